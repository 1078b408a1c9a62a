"""Images and objects in COCO's format: opened, checked, and read one image at a time."""

import math
import os
import pickle
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from PIL import Image
from pycocotools import mask as coco_masks
from torch import Tensor

from ...data.images import (
    decode_image,
    decompression_bomb_limit,
    describe_image_error,
    has_valid_size,
    open_image,
)
from ...data.pixels import AnyImage, PixelFormat, convert_pixels
from ...engine.results import shorten_list
from ...utils.files import read_json
from ...utils.validation import shorten
from ..pixels import make_pixel_format
from .config import DetectionDataConfig

# A record of an image, an annotation or a category, as it is in the file.
Record = dict[str, Any]

# Boxes that are narrower than this, in pixels, have no area: resized, both their sides could be the same number.
NARROWEST_BOX = 0.01
# pycocotools walks along a polygon in steps of a fifth of a pixel: corners far away would take all memory.
FARTHEST_CORNER = 100_000
# Letters of a file's name in a message.
LONGEST_NAME = 200


class Category(NamedTuple):
    """A kind of object, with its id in the file of annotations."""

    id: int
    name: str


class CocoSource:
    """A file of annotations and the folder of its images.

    All but the pixels is checked when it is opened; what makes no sense is refused with the file and the id.

    Args:
        file: The annotations, COCO's instances_*.json.
        folder: The images.
        limit: Take so many images, those with the lowest ids; None = all.
        max_pixels: Images with more pixels are refused; None = Pillow's limit.

    Attributes:
        pixel_format: The bands and values of images that the model gets.
        images: COCO's records of the images, in the order of their ids.
        categories: In the order of their ids. The label of a category is its place + 1; 0 is background.
        without_area: Ids of the annotations that cannot be learned from, for their box or their mask has no area.
    """

    def __init__(self, file: Path, folder: Path, limit: int | None = None, max_pixels: int | None = None) -> None:
        self.file, self.folder, self.max_pixels = file, folder, max_pixels
        self.pixel_format = PixelFormat()
        try:
            content = read_json(file)
        except ValueError as error:
            raise ValueError(f"{file} is not valid JSON ({error}): copy it again, or name another file") from error
        if not isinstance(content, dict):
            raise ValueError(
                f"{file} holds no COCO annotations: it should be a record of images, annotations and categories"
            )
        categories, images, annotations = (
            _by_id(file, content, key) for key in ("categories", "images", "annotations")
        )
        for number, record in categories.items():
            if not isinstance(record.get("name"), str):
                raise ValueError(f"category {number} in {file} has no name: give it one")
        self.categories = [Category(number, record["name"]) for number, record in sorted(categories.items())]
        self.labels = {category.id: place + 1 for place, category in enumerate(self.categories)}
        self.images = [record for _, record in sorted(images.items())][:limit]
        for record in self.images:
            _refuse(_image_problem(record, max_pixels), f"image {record['id']} in {file}")
        self._require_files()
        self._objects, self.without_area = self._gather(annotations, images)

    def _require_files(self) -> None:
        """Refuse missing images; each folder is listed once, because a disk may be far away."""
        paths = [os.path.split(record["file_name"]) for record in self.images]
        folders = {inside: self.folder / inside for inside, _ in paths}
        listed = {inside: set(os.listdir(path)) if path.is_dir() else set() for inside, path in folders.items()}
        missing = [
            record for record, (inside, name) in zip(self.images, paths, strict=True) if name not in listed[inside]
        ]
        if missing:
            raise FileNotFoundError(
                f"{len(missing)} of {len(self.images)} images of {self.file} are not in {self.folder}, such as "
                f"{_short(missing[0])} (image id {missing[0]['id']}): name the right folder, or take them out of "
                "the file"
            )

    def _gather(
        self, annotations: dict[int, Record], images: dict[int, Record]
    ) -> tuple["PackedLists", frozenset[int]]:
        """The annotations of each image that is taken, and the ids of those without area."""
        taken = {record["id"]: record for record in self.images}
        by_image: dict[int, list[Record]] = defaultdict(list)
        without_area = []
        for number, annotation in annotations.items():
            name = f"annotation {number} in {self.file}"
            for key, known in (("image_id", images), ("category_id", self.labels)):
                stated = annotation.get(key)
                # Compared by equality, 1.0 and true would pass for 1.
                if not _is_whole(stated) or stated not in known:
                    raise ValueError(
                        f"{name} has the {key} {stated!r:.80}, which the file does not have: remove one or add the "
                        "other"
                    )
            image = taken.get(annotation["image_id"])
            if image is not None:
                _refuse(_annotation_problem(annotation, image), name)
                by_image[image["id"]].append(annotation)
                if not annotation.get("iscrowd") and not _has_area(annotation, image):
                    without_area.append(number)
        return PackedLists(by_image[number] for number in taken), frozenset(without_area)

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        """What to call an image in messages."""
        record = self.images[index]
        return f"{self.folder / _short(record)} (image id {record['id']})"

    def open_image(self, index: int) -> AnyImage:
        """Open an image; it is not decoded yet."""
        return open_image(self.folder / self.images[index]["file_name"])

    def read_image(self, index: int) -> AnyImage:
        """Return an image in its pixel format, of the size that its record says.

        Annotations are for the pixels as they are stored. Only where the record's size says that they are for the image
        turned as its EXIF data say, it is turned.
        """
        record = self.images[index]
        size = record["width"], record["height"]
        try:
            with decompression_bomb_limit(self.max_pixels), self.open_image(index) as opened:
                convert = convert_pixels if opened.size == size else decode_image
                image = convert(opened, self.pixel_format)
                if image.size != size:
                    raise ValueError(
                        f"it has {opened.width} × {opened.height} pixels, but {size[0]} × {size[1]} by its record"
                    )
                return image
        # A broken file can make Pillow raise anything.
        except Exception as error:
            problem = describe_image_error(self.name(index), error)
            raise ValueError(f"{problem}: copy it again, or take it out of {self.file}") from error

    def read_target(self, index: int) -> dict[str, Tensor]:
        """Return the objects to learn of an image, without crowds and without those that have no area.

        Returns:
            boxes (objects, 4) as x1, y1, x2, y2 inside of the image, labels (objects,), and masks (objects, height,
            width) of 0 and 1.
        """
        image = self.images[index]
        objects = [
            annotation
            for annotation in self._objects[index]
            if not annotation.get("iscrowd") and annotation["id"] not in self.without_area
        ]
        boxes = [_clip_box(annotation["bbox"], image) for annotation in objects]
        labels = [self.labels[annotation["category_id"]] for annotation in objects]
        encoded = [_encode(annotation["segmentation"], image) for annotation in objects]
        # pycocotools cannot decode an empty list.
        masks = coco_masks.decode(encoded) if encoded else np.zeros((image["height"], image["width"], 0), np.uint8)
        return {
            "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
            "labels": torch.tensor(labels, dtype=torch.int64),
            "masks": torch.from_numpy(np.ascontiguousarray(masks.transpose(2, 0, 1))),
        }

    def annotations(self, index: int) -> list[Record]:
        """Return what the file says of the objects of an image, with crowds; masks are compressed RLE."""
        image = self.images[index]
        return [
            {**annotation, "segmentation": _encode(annotation["segmentation"], image)}
            for annotation in self._objects[index]
        ]

    def ground_truth(self) -> dict[str, list[Record]]:
        """COCO's images, annotations and categories for evaluation: all that the file says of the images taken.

        `iscrowd` and `area` are added where they are missing. An annotation with the id 0 gets another one, for
        pycocotools takes 0 for "no object" and would count its detection as a mistake.
        """
        annotations = []
        for index, image in enumerate(self.images):
            for annotation in self._objects[index]:
                if annotation.get("iscrowd") is None:
                    annotation["iscrowd"] = 0
                if annotation.get("area") is None:
                    annotation["area"] = float(coco_masks.area(_encode(annotation["segmentation"], image)))
                annotations.append(annotation)
        unused = max((annotation["id"] for annotation in annotations), default=0) + 1
        for annotation in annotations:
            annotation["id"] = annotation["id"] or unused
        categories = [category._asdict() for category in self.categories]
        return {"images": list(self.images), "annotations": annotations, "categories": categories}


class PackedLists:
    """Lists in one block of memory, which forked processes share.

    Of Python's own objects, each process would soon have a copy, because counting references writes to them.
    """

    def __init__(self, lists: Iterable[list[Any]]) -> None:
        packed = [pickle.dumps(items) for items in lists]
        self.ends = np.fromiter(accumulate(map(len, packed), initial=0), np.int64)
        self.block = b"".join(packed)

    def __getitem__(self, index: int) -> list[Any]:
        return pickle.loads(memoryview(self.block)[self.ends[index] : self.ends[index + 1]])


def open_coco(config: DetectionDataConfig, training: bool, channels: int = 3) -> CocoSource:
    """The images and annotations for training or for evaluation of a model with this number of channels.

    Objects without area are left out of training with a warning; evaluation keeps them, as COCO does.
    """
    prefix, values = "train" if training else "eval", vars(config)
    split, annotations, images = (values[f"{prefix}_{name}"] for name in ("split", "annotations", "folder"))
    home = Path(config.path).expanduser()
    file = home / "annotations" / f"instances_{split}.json" if annotations is None else Path(annotations).expanduser()
    folder = home / split if images is None else Path(images).expanduser()
    layout = f"check --data.path and --data.{prefix}_split, or name it with --data.{prefix}"
    if not file.is_file():
        raise FileNotFoundError(f"no file of annotations at {file} ({_splits(home)}): {layout}_annotations")
    if not folder.is_dir():
        splits = f" ({_splits(home)})" if images is None else ""
        raise FileNotFoundError(f"no folder of images at {folder}{splits}: {layout}_folder")
    source = CocoSource(file, folder, values[f"max_{prefix}_samples"], config.max_pixels)
    source.pixel_format = make_pixel_format(config, channels)
    if training and source.without_area:
        ids = shorten_list(list(map(str, sorted(source.without_area))), 5)
        warnings.warn(
            f"{len(source.without_area)} objects in {file} are left out of training, because their boxes or masks have "
            f"no area: fix or remove the annotations {ids}",
            stacklevel=2,
        )
    return source


def _splits(home: Path) -> str:
    """Which splits have annotations, for messages."""
    names = sorted(file.stem.removeprefix("instances_") for file in home.glob("annotations/instances_*.json"))
    return f"the splits are {', '.join(names)}" if names else "there are no splits"


def _by_id(file: Path, content: Record, key: str) -> dict[int, Record]:
    """The records of one kind by their ids, in the order of the file."""
    records = content.get(key)
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError(
            f"{file} has no list of records called {key}, so it is not in COCO's format: name another file"
        )
    if not records and key != "annotations":
        raise ValueError(f"{file} has no {key}: name another file")
    found: dict[int, Record] = {}
    for place, record in enumerate(records):
        number = record.get("id")
        if not _is_whole(number):
            raise ValueError(
                f"record {place} of the {key} in {file} has the id {number!r:.100}: it should be a whole number"
            )
        if number in found:
            raise ValueError(f"{file} has two {key} with the id {number}: give one of them another id")
        found[number] = record
    return found


def _short(image: Record) -> str:
    """The file of an image, as far as a message has a place for it."""
    return shorten(image["file_name"], LONGEST_NAME)


def _refuse(problem: str, name: str) -> None:
    if problem:
        raise ValueError(f"{name} {problem}")


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def are_numbers(values: Any, limit: float = sys.float_info.max) -> TypeGuard[list[float]]:
    """Whether these are numbers, finite and no farther from 0 than a limit."""
    if not isinstance(values, list) or not set(map(type, values)) <= {int, float}:
        return False
    # A loop would take as long as reading the file. Only a sum is sure to tell of what is not a number.
    return max(map(abs, values), default=0) <= limit and math.isfinite(sum(values))


def _image_problem(image: Record, max_pixels: int | None = None) -> str:
    """Return what is wrong, as a sentence without its subject; "" = nothing."""
    file_name, width, height = (image.get(key) for key in ("file_name", "width", "height"))
    if not isinstance(file_name, str):
        return "has no file_name: add it"
    if os.path.isabs(file_name) or ".." in Path(file_name).parts:
        return f"has the file_name {_short(image)}, which leads out of the folder of images: name the file inside of it"
    if not (_is_whole(width) and _is_whole(height) and width > 0 and height > 0):
        return f"has the width {width!r:.80} and the height {height!r:.80}: give the size of {_short(image)} in pixels"
    if not has_valid_size((width, height)):
        return f"has {width} × {height} pixels, which show nothing: remove it"
    limit = max_pixels or Image.MAX_IMAGE_PIXELS
    if limit is not None and width * height > limit:
        return (
            f"has {width} × {height} pixels, more than the limit of {limit}: allow more with --max-pixels "
            f"{width * height}, or cut it into smaller ones"
        )
    return ""


def _annotation_problem(annotation: Record, image: Record) -> str:
    """Return what is wrong, as a sentence without its subject; "" = nothing."""
    area = annotation.get("area")
    if problem := box_problem(annotation.get("bbox")):
        return problem
    if area is not None and not are_numbers([area]):
        return f"has the area {area!r:.100}: it should be a number of pixels"
    if annotation.get("iscrowd") not in (None, 0, 1):
        return f"has the iscrowd {annotation['iscrowd']!r:.100}: it should be 0 or 1"
    segmentation = annotation.get("segmentation")
    if not segmentation:
        return "has no segmentation, but masks are learned from it: add it, or remove the annotation"
    if isinstance(segmentation, list):
        return _polygon_problem(segmentation)
    return rle_problem(segmentation, image)


def box_problem(box: Any) -> str:
    """Return what is wrong, as a sentence without its subject; "" = nothing."""
    if not are_numbers(box) or len(box) != 4:
        return f"has the bbox {box!r:.100}: it should be four numbers, x, y, width and height"
    if box[2] < 0 or box[3] < 0:
        return f"has the bbox {box}, whose width or height is negative: fix it"
    return ""


def _polygon_problem(polygons: list[Any]) -> str:
    for polygon in polygons:
        if not are_numbers(polygon, FARTHEST_CORNER):
            return "has a polygon that is not a list of numbers between ±100,000, x and y in turn: fix or remove it"
        if len(polygon) < 6 or len(polygon) % 2:
            return f"has a polygon of {len(polygon)} numbers: it should have x and y of three corners or more"
    return ""


def rle_problem(rle: Any, image: Record) -> str:
    """Return what is wrong, as a sentence without its subject; "" = nothing."""
    size = [image["height"], image["width"]]
    if not isinstance(rle, dict) or not isinstance(rle.get("counts"), list | str):
        return "has a segmentation that is neither a list of polygons nor RLE with size and counts: fix it"
    if rle.get("size") != size:
        found = f"{rle.get('size')!r:.80}"
        return f"has a mask of the size {found}, but its image has {size}, height and width: fix one of them"
    runs = _run_lengths(rle["counts"])
    if not all(_is_whole(run) and run >= 0 for run in runs) or sum(runs) != size[0] * size[1]:
        # pycocotools would fill such a mask with whatever is in memory.
        return "has RLE counts that do not add up to the pixels of its image: write the mask again"
    return ""


def _run_lengths(counts: list[Any] | str) -> list[Any]:
    """The lengths of runs of 0 and 1 in turn. Compressed, they are in pieces of 5 bits, as steps from those before."""
    if isinstance(counts, list):
        return counts
    runs: list[int] = []
    run = shift = 0
    for letter in counts:
        piece = ord(letter) - 48
        run |= (piece & 31) << shift
        shift += 5
        if not piece & 32:
            if piece & 16:
                run -= 1 << shift
            runs.append(run + runs[-2] if len(runs) > 2 else run)
            run = shift = 0
    return runs


def _clip_box(box: list[float], image: Record) -> tuple[float, float, float, float]:
    """The part of a box that lies in its image, from x, y, width, height to x1, y1, x2, y2."""
    x, y, width, height = box
    right, bottom = float(image["width"]), float(image["height"])
    return max(x, 0.0), max(y, 0.0), min(x + width, right), min(y + height, bottom)


def _has_area(annotation: Record, image: Record) -> bool:
    """Whether the box of an object has an area in the image and its mask a pixel, as far as one can tell quickly."""
    left, top, right, bottom = _clip_box(annotation["bbox"], image)
    width, height = right - left, bottom - top
    if width < NARROWEST_BOX or height < NARROWEST_BOX:
        return False
    segmentation = annotation["segmentation"]
    if isinstance(segmentation, dict):
        return any(_run_lengths(segmentation["counts"])[1::2])
    # A polygon takes time to fill, so only those are that may fall between pixels: the thin ones.
    area = annotation.get("area")
    if min(width, height) >= 2 and (area is None or area >= max(width, height)):
        return True
    return bool(coco_masks.area(_encode(segmentation, image)))


def _encode(segmentation: Any, image: Record) -> Record:
    """A mask as compressed RLE, whichever way it is written."""
    if isinstance(segmentation, dict) and isinstance(segmentation["counts"], str):
        return segmentation
    encoded = coco_masks.frPyObjects(segmentation, image["height"], image["width"])
    return coco_masks.merge(encoded) if isinstance(segmentation, list) else encoded
