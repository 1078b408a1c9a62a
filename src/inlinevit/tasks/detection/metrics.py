"""From the output of a detector to COCO's results format, and from that to COCO's metrics."""

import contextlib
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from pycocotools import mask as coco_masks
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import expand_boxes, expand_masks
from torchvision.transforms.v2.functional import pil_to_tensor

from ...engine.evaluator import Evaluation, Evaluator
from ...engine.results import percent
from ...utils.atomic import atomic_write_bytes, finite
from ...utils.files import read_json
from ..dense import make_single_loader
from .coco import Category, CocoSource, Record, what_is_wrong_with_rle
from .model import DetectorTransform

# COCO's names for boxes and masks.
PARTS = {"box": "bbox", "mask": "segm"}
FIELDS = {"box": "bbox", "mask": "segmentation"}
# COCO's twelve numbers in the order of its summary: s, m and l are small, medium and large objects.
NUMBERS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
MASK_THRESHOLD = 0.5
# The files of results, for boxes (bbox) and masks (segm).
RESULTS_JSON = "results_{}.json"


@dataclass
class CategoryPrecision:
    """Average precision of one category.

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
class DetectionEvaluation(Evaluation):
    """The result of an evaluation.

    Attributes:
        box: COCO's twelve numbers for boxes by name, 0 … 1; NaN where there are no such objects. None if the results
            have no boxes.
        mask: The same for masks.
        categories: AP by category, in the order of their ids.
        images: How many images were evaluated.
        results: What was evaluated, in COCO's results format; None = it is not to be written.
    """

    box: dict[str, float] | None
    mask: dict[str, float] | None
    categories: list[CategoryPrecision]
    images: int
    results: list[Record] | None = None

    def numbers(self) -> dict[str, float]:
        """See Evaluation.numbers: box_AP, box_AP50, …, mask_AP, …."""
        parts = {"box": self.box, "mask": self.mask}
        return {f"{part}_{name}": value for part, some in parts.items() for name, value in (some or {}).items()}

    def tables(self) -> list[list[dict[str, str]]]:
        parts = {"boxes": self.box, "masks": self.mask}
        known = {part: numbers for part, numbers in parts.items() if numbers is not None}
        return [
            [{"": part, **{f"{name} %": percent(numbers[name]) for name in names}} for part, numbers in known.items()]
            for names in (NUMBERS[:6], NUMBERS[6:])
        ]

    def class_scores(self) -> tuple[Sequence[str], Mapping[str, Sequence[float]]]:
        """See Evaluation.class_scores; masks say more than boxes."""
        names = [one.category.name for one in self.categories]
        scores = {"mask AP": [one.mask for one in self.categories], "box AP": [one.box for one in self.categories]}
        known = {heading: [value for value in values if value is not None] for heading, values in scores.items()}
        return names, {heading: values for heading, values in known.items() if len(values) == len(names)}

    def per_class(self) -> list[Record]:
        rows = []
        for one in self.categories:
            precisions = {"box_AP": one.box, "mask_AP": one.mask}
            known = finite({name: math.nan if value is None else value for name, value in precisions.items()})
            rows.append({**asdict(one.category), "objects": one.objects, **known})
        return rows

    def save_files(self, folder: Path) -> None:
        """See Evaluation.save_files.

        Boxes and masks are in a file each: of a result that has both, pycocotools takes the area from the box.
        """
        for part, iou_type in PARTS.items() if self.results is not None else ():
            content = json.dumps(only(part, self.results or [])).encode()
            atomic_write_bytes(folder / RESULTS_JSON.format(iou_type), content)


class DetectionEvaluator(Evaluator):
    """Evaluates detectors on one data set, one image at a time: the same for any number of processes.

    Args:
        source: The images.
        workers: Data workers.
        categories: The category of each of the model's labels 1, 2, …; None = those of the source.
        keep_results: Whether the evaluation is to have the results.
        results: Evaluate these results instead of a model's.
    """

    def __init__(
        self,
        source: CocoSource,
        workers: int,
        *,
        categories: Sequence[Category] | None = None,
        keep_results: bool = False,
        results: list[Record] | None = None,
    ) -> None:
        self.source, self.workers, self.keep_results, self.results = source, workers, keep_results, results
        self.categories = source.categories if categories is None else categories

    def loader(self, process: int, processes: int) -> Iterable[tuple[int, Tensor]]:
        """See Evaluator.loader: index and image (3, height, width) uint8."""
        if self.results is not None:
            return []
        return make_single_loader(
            len(self.source), self.read, workers=self.workers, process=process, processes=processes
        )

    def read(self, index: int) -> tuple[int, Tensor]:
        """Read an image."""
        return index, pil_to_tensor(self.source.read_image(index))

    def reset(self, device: torch.device) -> None:
        super().reset(device)
        self.found: list[tuple[int, list[Record]]] = []

    def update(self, model: nn.Module, batch: tuple[int, Tensor]) -> None:
        index, image = batch
        answer = detect(model, image.to(self.device, non_blocking=True))
        height, width = image.shape[-2:]
        image_id = self.source.images[index]["id"]
        self.found.append((index, to_results(answer, image_id, (height, width), self.categories)))

    def collect(self) -> list[Record]:
        """Return the results of all processes, in COCO's format and in the order of the images."""
        by_image = sorted(gather_object(self.found), key=itemgetter(0))
        return [result for _, results in by_image for result in results]

    def compute(self, accelerator: Accelerator) -> DetectionEvaluation:
        """See Evaluator.compute; one process computes the metrics, which takes minutes for COCO."""
        results = self.collect() if self.results is None else self.results
        outcome: list[Any] = [None]
        if accelerator.is_main_process:
            evaluation = coco_metrics(self.source.ground_truth(), results)
            outcome = [replace(evaluation, results=results if self.keep_results else None)]
        (evaluation,) = broadcast_object_list(outcome)
        return evaluation


@torch.no_grad()
def detect(model: nn.Module, image: Tensor) -> dict[str, Tensor]:
    """Run a detector on an image, without pasting the masks into it: in a large image they would fill the memory.

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
    """Convert the output of a detector to COCO's results format. Nothing is rounded.

    Args:
        answer: As `detect` gives it.
        image_id: COCO's id of the image.
        size: Height and width of the image.
        categories: What the labels 1, 2, … mean.
    """
    # A head may be wider than there were categories: labels without a category are dropped.
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
    """Encode masks as COCO's compressed RLE.

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
    """Compute COCO's metrics with pycocotools.

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
    """Return the boxes or the masks of results, without the other: pycocotools would take the area from it."""
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
    """Read results from files, and check them against the data that they are evaluated on.

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
            raise ValueError(
                f"{file} is not valid JSON ({error}): name results in COCO's format with --results"
            ) from error
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
            return "has a segmentation that is not a compressed RLE, as in COCO's results format: convert it"
        return what_is_wrong_with_rle(rle, images[image])
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
