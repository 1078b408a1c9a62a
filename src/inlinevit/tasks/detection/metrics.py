"""From what a detector answers to COCO's results, and from those to COCO's numbers."""

import contextlib
import io
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from pycocotools import mask as coco_masks
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import expand_boxes, expand_masks

from ...utils.files import read_json
from .coco import Category, Record, what_is_wrong_with_rle
from .model import DetectorTransform

# COCO's words for boxes and masks, by ours.
PARTS = {"box": "bbox", "mask": "segm"}
FIELDS = {"box": "bbox", "mask": "segmentation"}
# COCO's twelve numbers in the order of its summary: s, m and l are small, medium and large objects.
NUMBERS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
MASK_THRESHOLD = 0.5


@dataclass
class CategoryPrecision:
    """How well the objects of one category are found.

    Attributes:
        category: The category.
        objects: How many there are, without crowds.
        box: AP of the boxes, 0 … 1; nan if there are no objects, None if there are no boxes to evaluate.
        mask: The same for the masks.
    """

    category: Category
    objects: int
    box: float | None
    mask: float | None


@dataclass
class DetectionEvaluation:
    """The outcome of an evaluation.

    Attributes:
        box: COCO's twelve numbers for boxes by name, 0 … 1; nan where there are no such objects. None if the results
            have no boxes.
        mask: The same for masks.
        per_class: AP by category, in the order of their ids.
        images: How many images were evaluated.
    """

    box: dict[str, float] | None
    mask: dict[str, float] | None
    per_class: list[CategoryPrecision]
    images: int

    def numbers(self) -> dict[str, float]:
        """The metrics that are one number each: box_AP, box_AP50, …, mask_AP, …."""
        parts = {"box": self.box, "mask": self.mask}
        return {f"{part}_{name}": value for part, some in parts.items() for name, value in (some or {}).items()}


@torch.no_grad()
def detect(model: nn.Module, image: Tensor) -> dict[str, Tensor]:
    """What a detector answers, with masks that are not yet pasted into the image: those of large ones fill a memory.

    Args:
        model: The detector, in evaluation mode.
        image: (3, height, width) uint8, where the model is.

    Returns:
        Boxes (objects, 4), labels (objects,), scores (objects,) and masks (objects, 1, side, side).
    """
    transform = cast(DetectorTransform, model.transform)
    before, transform.pastes_masks = transform.pastes_masks, False
    try:
        (answer,) = model([image.float() / 255])
    finally:
        transform.pastes_masks = before
    return answer


def to_results(
    answer: dict[str, Tensor], image_id: int, size: tuple[int, int], categories: Sequence[Category]
) -> list[Record]:
    """A detector's answer in COCO's results format. Nothing is rounded.

    Args:
        answer: As `detect` gives it.
        image_id: COCO's id of the image.
        size: Height and width of the image.
        categories: What the labels 1, 2, … mean.
    """
    # A head may be wider than there were categories: what it takes for a nameless one cannot be told.
    is_named = answer["labels"] <= len(categories)
    boxes, labels, scores, masks = (answer[name][is_named] for name in ("boxes", "labels", "scores", "masks"))
    corners = boxes.cpu().double()
    sides = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], dim=1).tolist()
    return [
        {
            "image_id": image_id,
            "category_id": categories[label - 1].id,
            "bbox": box,
            "score": score,
            "segmentation": rle,
        }
        for label, box, score, rle in zip(
            labels.tolist(), sides, scores.tolist(), encode_masks(masks, boxes, size), strict=True
        )
    ]


def encode_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Iterator[Record]:
    """Masks as COCO's compressed RLE.

    The same as torchvision's paste_masks_in_image, without an image of numbers for each mask.

    Args:
        masks: (objects, 1, side, side) probabilities within the boxes.
        boxes: (objects, 4) x1 y1 x2 y2.
        size: Height and width of the image.
    """
    height, width = size
    padded, scale = expand_masks(masks.float().cpu(), padding=1)
    places = expand_boxes(boxes.float().cpu(), scale).to(torch.int64).tolist()
    # COCO counts pixels column by column.
    canvas = np.zeros(size, np.uint8, order="F")
    for mask, (x1, y1, x2, y2) in zip(padded, places, strict=True):
        # Both ends are inside.
        whole = F.interpolate(mask[None], (max(y2 - y1 + 1, 1), max(x2 - x1 + 1, 1)), mode="bilinear")[0, 0]
        left, top = max(x1, 0), max(y1, 0)
        part = canvas[top : y2 + 1, left : x2 + 1]
        part[:] = whole[top - y1 : height - y1, left - x1 : width - x1] > MASK_THRESHOLD
        yield {"size": list(size), "counts": coco_masks.encode(canvas)["counts"].decode()}
        part[:] = 0


def coco_metrics(ground_truth: Record, results: Sequence[Record]) -> DetectionEvaluation:
    """COCO's numbers, by pycocotools.

    Args:
        ground_truth: COCO's images, annotations and categories.
        results: In COCO's results format, with boxes, masks or both. Sizes are those of boxes for boxes, and those of
            masks for masks, as COCO has them in two files.
    """
    sorted_categories = sorted(ground_truth["categories"], key=lambda record: record["id"])
    categories = [Category(record["id"], record["name"]) for record in sorted_categories]
    numbers: dict[str, dict[str, float] | None] = {}
    precisions: dict[str, list[float] | list[None]] = {}
    for part, iou_type in PARTS.items():
        chosen = only(part, results)
        if results and not chosen:
            numbers[part], precisions[part] = None, [None] * len(categories)
        else:
            numbers[part], precisions[part] = _evaluate_part(ground_truth, chosen, iou_type)
    objects = Counter(record["category_id"] for record in ground_truth["annotations"] if not record["iscrowd"])
    per_class = [
        CategoryPrecision(category, objects[category.id], box, mask)
        for category, box, mask in zip(categories, precisions["box"], precisions["mask"], strict=True)
    ]
    return DetectionEvaluation(numbers["box"], numbers["mask"], per_class, images=len(ground_truth["images"]))


def only(part: str, results: Sequence[Record]) -> list[Record]:
    """The boxes or the masks of results, without the others, which pycocotools would take sizes of objects from."""
    (other,) = (field for name, field in FIELDS.items() if name != part)
    return [{name: value for name, value in one.items() if name != other} for one in results if FIELDS[part] in one]


def _evaluate_part(ground_truth: Record, results: list[Record], iou_type: str) -> tuple[dict[str, float], list[float]]:
    """COCO's numbers, and AP by category in the order of ids, for boxes (bbox) or masks (segm)."""
    # pycocotools writes into the records.
    objects = [dict(record) for record in ground_truth["annotations"]]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = _indexed({**ground_truth, "annotations": objects})
        # It cannot load an empty list.
        found = truth.loadRes(results) if results else _indexed({**ground_truth, "annotations": []})
        evaluation = COCOeval(truth, found, iou_type)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    # IoU thresholds × recalls × categories, over all sizes, with the largest number of detections.
    precision = evaluation.eval["precision"][:, :, :, 0, -1]
    by_category = [float(one.mean()) if (one > -1).all() else math.nan for one in np.moveaxis(precision, 2, 0)]
    # -1 stands for no such objects.
    stats = [float(value) if value > -1 else math.nan for value in evaluation.stats]
    return dict(zip(NUMBERS, stats, strict=True)), by_category


def _indexed(dataset: Record) -> COCO:
    coco = COCO()
    coco.dataset = dataset
    coco.createIndex()
    return coco


def read_results(files: Sequence[str], ground_truth: Record) -> list[Record]:
    """Results out of files, checked against the data that they are to be evaluated on.

    Args:
        files: In COCO's results format; boxes and masks may be in files of their own.
        ground_truth: COCO's images, annotations and categories.
    """
    images = {record["id"]: record for record in ground_truth["images"]}
    categories = {record["id"] for record in ground_truth["categories"]}
    results = []
    for file in files:
        try:
            content = read_json(file)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"no file at {file}: name results in COCO's format with --results") from error
        except ValueError as error:
            raise ValueError(f"{file} is no JSON ({error}): name results in COCO's format with --results") from error
        if not isinstance(content, list):
            raise ValueError(f"{file} holds no list: name results in COCO's format with --results")
        for place, result in enumerate(content):
            problem = _what_is_wrong(result, images, categories)
            if problem:
                raise ValueError(f"result {place} of {file} {problem}")
        results += content
    return results


def _what_is_wrong(result: Any, images: dict[Any, Record], categories: set[Any]) -> str:
    """Why a result cannot be evaluated, as a sentence without its subject; "" if it can be."""
    if not isinstance(result, dict) or not {"image_id", "category_id", "score"} <= result.keys():
        return "lacks image_id, category_id or score: write it in COCO's results format"
    image, category, score = result["image_id"], result["category_id"], result["score"]
    if not _is_number(score):
        return f"has the score {score!r}: it should be a number"
    for number, kind, known in ((image, "image", images), (category, "category", categories)):
        if not isinstance(number, int) or number not in known:
            return f"is for {kind} {number!r}, which the data do not have: evaluate it on the data that it was made for"
    if not result.keys() & set(FIELDS.values()):
        return f"has neither {' nor '.join(FIELDS.values())}: write it in COCO's results format"
    if "bbox" in result:
        box = result["bbox"]
        if not (isinstance(box, list) and len(box) == 4 and all(map(_is_number, box))):
            return f"has the bbox {box!r}: it should be four numbers, x, y, width and height"
    if "segmentation" in result:
        rle = result["segmentation"]
        if not (isinstance(rle, dict) and isinstance(rle.get("counts"), str)):
            return "has a segmentation that is no compressed RLE, as COCO wants it in results: convert it"
        return what_is_wrong_with_rle(rle, images[image])
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
