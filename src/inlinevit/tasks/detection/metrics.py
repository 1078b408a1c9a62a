"""From the output of a detector to COCO's results format, and from that to COCO's metrics."""

import contextlib
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from PIL import Image
from pycocotools import mask as coco_masks
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import expand_boxes, expand_masks
from torchvision.ops import box_convert

from ...data.pixels import AnyImage, image_to_tensor, preview
from ...engine.evaluator import Evaluation
from ...engine.records import rounded, to_picture
from ...engine.results import percent
from ...utils.atomic import atomic_write_bytes, finite
from ...utils.files import read_json
from ..dense import SingleImageEvaluator
from .coco import Category, CocoSource, Record, are_numbers, box_problem, rle_problem
from .visualize import draw_objects

# COCO's names for the two kinds of results, as a type of IoU and as a field of results.
IOU_TYPES = {"box": "bbox", "mask": "segm"}
FIELDS = {"box": "bbox", "mask": "segmentation"}
# COCO's twelve numbers in the order of its summary: s, m and l are small, medium and large objects.
NUMBERS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
MASK_THRESHOLD = 0.5
# In predictions.csv, an object is found if a detection overlaps it by this much.
MATCH_IOU = 0.5
SCORE_THRESHOLD = 0.5
# What images that cannot be read are replaced by in pictures.
BLANK = (127, 127, 127)
# The files of results, for boxes (bbox) and masks (segm).
RESULTS_JSON = "results_{}.json"


@dataclass
class DetectionEvaluation(Evaluation):
    """The result of an evaluation. `metrics` and `class_ap` have those of "box" and "mask" that the results have.

    Attributes:
        metrics: COCO's twelve numbers by name, 0 … 1; NaN where there are no such objects.
        class_ap: AP of each category, 0 … 1; NaN for one without objects.
        categories: In the order of their ids.
        objects: How many objects of each category there are, without crowds.
        images: How many images were evaluated.
        results: What was evaluated, in COCO's results format; None = it is not to be written.
    """

    worst_caption: ClassVar[str] = (
        "The images with the lowest F1 at an IoU of 0.5; among equals, those with the most mistakes."
    )

    metrics: dict[str, dict[str, float]]
    class_ap: dict[str, list[float]]
    categories: list[Category]
    objects: list[int]
    images: int
    results: list[Record] | None = None

    def numbers(self) -> dict[str, float]:
        """See Evaluation.numbers: box_AP, box_AP50, …, mask_AP, …."""
        return {f"{kind}_{name}": value for kind, some in self.metrics.items() for name, value in some.items()}

    def tables(self) -> list[list[dict[str, str]]]:
        titles = {"box": "boxes", "mask": "masks"}
        return [
            [
                {"": titles[kind], **{f"{name} %": percent(numbers[name]) for name in names}}
                for kind, numbers in self.metrics.items()
            ]
            for names in (NUMBERS[:6], NUMBERS[6:])
        ]

    def class_scores(self) -> tuple[Sequence[str], Mapping[str, Sequence[float]]]:
        """See Evaluation.class_scores; masks say more than boxes."""
        scores = {f"{kind} AP": self.class_ap[kind] for kind in ("mask", "box") if kind in self.class_ap}
        return [category.name for category in self.categories], scores

    def per_class(self) -> list[Record]:
        unknown = [math.nan] * len(self.categories)
        precisions = (self.class_ap.get(kind, unknown) for kind in IOU_TYPES)
        return [
            {**category._asdict(), "objects": objects, **finite({"box_AP": box, "mask_AP": mask})}
            for category, objects, box, mask in zip(self.categories, self.objects, *precisions, strict=True)
        ]

    def save_files(self, folder: Path) -> None:
        """See Evaluation.save_files.

        Boxes and masks are in a file each: of a result that has both, pycocotools takes the area from the box.
        """
        for kind, iou_type in IOU_TYPES.items() if self.results is not None else ():
            content = json.dumps(results_of(kind, self.results or [])).encode()
            atomic_write_bytes(folder / RESULTS_JSON.format(iou_type), content)


class DetectionEvaluator(SingleImageEvaluator):
    """Evaluates detectors on one data set.

    Args:
        source: The images.
        workers: Data workers.
        categories: The category of each of the model's labels 1, 2, …; None = those of the source.
        keep_results: Whether the evaluation is to have the results.
        results: Evaluate these results instead of a model's.
        threshold: Detections with lower scores do not count in the records of single images.
    """

    def __init__(
        self,
        source: CocoSource,
        workers: int,
        *,
        categories: Sequence[Category] | None = None,
        keep_results: bool = False,
        results: list[Record] | None = None,
        threshold: float = SCORE_THRESHOLD,
    ) -> None:
        super().__init__(source, workers)
        self.keep_results, self.results, self.threshold = keep_results, results, threshold
        self.categories = source.categories if categories is None else categories

    def loader(self, process: int, processes: int) -> Iterable[tuple[int, Tensor]]:
        return super().loader(process, processes) if self.results is None else []

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        """Return the index and the image (channels, height, width) uint8."""
        return index, image_to_tensor(self.source.read_image(index))

    def reset(self, device: torch.device) -> None:
        super().reset(device)
        self.found: list[tuple[int, list[Record]]] = []

    def update(self, model: nn.Module, batch: tuple[int, Tensor]) -> None:
        index, image = batch
        answer = detect(model, image.to(self.device, non_blocking=True))
        height, width = image.shape[-2:]
        image_id = self.source.images[index]["id"]
        results = to_results(answer, image_id, (height, width), self.categories)
        self.found.append((index, results))
        self.record(index, results, partial(to_picture, image))

    def record(self, index: int, results: Sequence[Record], read: Callable[[], AnyImage]) -> None:
        """Record an image with its results, if single images are recorded; `read` returns the image."""
        if self.recorder is None:
            return
        truth = self.source.annotations(index)
        chosen = [result for result in results if result["score"] >= self.threshold]
        right, wrong, missed = count_matches(chosen, truth)
        objects = [one for one in truth if not one.get("iscrowd")]
        mistakes, total = wrong + missed, 2 * right + wrong + missed
        # Nothing to find and nothing found is right.
        f1 = 2 * right / total if total else 1.0
        values = {
            "image_id": self.source.images[index]["id"],
            "objects": len(objects),
            "detections": len(chosen),
            "tp": right,
            "fp": wrong,
            "fn": missed,
            **rounded(
                {
                    "precision": right / (right + wrong) if right + wrong else math.nan,
                    "recall": right / (right + missed) if right + missed else math.nan,
                    "f1": f1,
                }
            ),
        }

        def draw() -> dict[str, Image.Image]:
            image = preview(read())
            return {
                name: draw_objects(image, drawn, self.source.categories)
                for name, drawn in (("truth", objects), ("prediction", chosen))
            }

        file = str(self.source.folder / self.source.images[index]["file_name"])
        lines = (f"F1 {percent(f1)} %: {right} found, {wrong} wrong, {missed} missed",)
        badness = (1 - f1, float(mistakes)) if mistakes else None
        self.recorder.add(index, file, values, badness=badness, lines=lines, draw=draw)

    def record_stored(self) -> None:
        """Record all images with stored results; images that cannot be read are drawn blank."""
        results, by_image = self.results or [], dict[int, list[Record]]()
        # Boxes and masks may come from two files: then every object is there twice.
        for result in [one for one in results if "bbox" in one] or results:
            by_image.setdefault(result["image_id"], []).append(result)
        for index, image in enumerate(self.source.images):
            self.record(index, by_image.get(image["id"], []), partial(self.read_or_blank, index))

    def read_or_blank(self, index: int) -> Image.Image:
        """Return an image, or a grey one of its size: stored results can be evaluated without images."""
        image = self.source.images[index]
        try:
            return self.source.read_image(index)
        except ValueError:
            return Image.new("RGB", (image["width"], image["height"]), BLANK)

    def compute(self, accelerator: Accelerator) -> DetectionEvaluation:
        """See Evaluator.compute; one process computes the metrics, which takes minutes for COCO."""
        results = self.results
        if results is None:
            # In the order of the images.
            by_image = sorted(gather_object(self.found), key=itemgetter(0))
            results = [result for _, found in by_image for result in found]
        outcome: list[Any] = [None]
        if accelerator.is_main_process:
            if self.results is not None:
                self.record_stored()
            evaluation = coco_metrics(self.source.ground_truth(), results)
            outcome = [replace(evaluation, results=results if self.keep_results else None)]
        (evaluation,) = broadcast_object_list(outcome)
        return evaluation


@torch.no_grad()
def detect(model: nn.Module, image: Tensor) -> dict[str, Tensor]:
    """Run a detector on an image, without pasting the masks into it: in a large image they would fill the memory.

    Args:
        model: The detector, in evaluation mode.
        image: (channels, height, width) uint8, where the model is.

    Returns:
        Boxes (objects, 4), labels (objects,), scores (objects,) and masks (objects, 1, side, side).
    """
    (answer,) = model([image.float() / 255], paste_masks=False)
    return answer


def to_results(
    answer: dict[str, Tensor], image_id: int, size: tuple[int, int], categories: Sequence[Category]
) -> list[Record]:
    """Convert the output of `detect` to COCO's results format. Nothing is rounded.

    Args:
        answer: The output.
        image_id: COCO's id of the image.
        size: Height and width of the image.
        categories: What the labels 1, 2, … mean.
    """
    # A head may be wider than there were categories: labels without a category are dropped.
    is_named = answer["labels"] <= len(categories)
    boxes, labels, scores, masks = (answer[name][is_named] for name in ("boxes", "labels", "scores", "masks"))
    ids = [categories[label - 1].id for label in labels.tolist()]
    corners = box_convert(boxes.cpu().double(), "xyxy", "xywh").tolist()
    objects = zip(ids, corners, scores.tolist(), encode_masks(masks, boxes, size), strict=True)
    return [
        {"image_id": image_id, "category_id": number, "bbox": box, "score": score, "segmentation": rle}
        for number, box, score, rle in objects
    ]


def count_matches(results: Sequence[Record], truth: Sequence[Record]) -> tuple[int, int, int]:
    """Count the detections of an image that find an object, those that do not, and the objects that none finds.

    Each object is found by at most one detection of its category, the highest score first, with an IoU of at least
    0.5 of boxes or, if there are none, of masks. As in COCO, detections in crowds do not count.

    Args:
        results: The detections in COCO's results format.
        truth: COCO's annotations of the image, with masks as compressed RLE.
    """
    right = wrong = missed = 0
    for category in {one["category_id"] for one in (*results, *truth)}:
        found = sorted((one for one in results if one["category_id"] == category), key=lambda one: -one["score"])
        objects = [one for one in truth if one["category_id"] == category]
        crowds = np.array([bool(one.get("iscrowd")) for one in objects], bool)
        key = FIELDS["box" if all("bbox" in one for one in found) else "mask"]
        overlaps = np.zeros((len(found), len(objects)))
        if found and objects:
            overlaps = np.nan_to_num(coco_masks.iou([one[key] for one in found], [one[key] for one in objects], crowds))
        is_found = np.zeros(len(objects), bool)
        for row in overlaps:
            free = np.where(is_found | crowds, -1.0, row)
            if len(objects) and free.max() >= MATCH_IOU:
                is_found[free.argmax()] = True
                right += 1
            elif not (row[crowds] >= MATCH_IOU).any():
                wrong += 1
        missed += int((~is_found & ~crowds).sum())
    return right, wrong, missed


def encode_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Iterator[Record]:
    """Encode masks (objects, 1, side, side), probabilities within boxes x1 y1 x2 y2, as COCO's compressed RLE.

    The same as torchvision's paste_masks_in_image, without an image of numbers for each mask.
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
        region = canvas[top : y2 + 1, left : x2 + 1]
        region[:] = whole[top - y1 : height - y1, left - x1 : width - x1] > MASK_THRESHOLD
        yield {"size": list(size), "counts": coco_masks.encode(canvas)["counts"].decode()}
        region[:] = 0


def coco_metrics(ground_truth: Record, results: Sequence[Record]) -> DetectionEvaluation:
    """Compute COCO's metrics with pycocotools.

    Args:
        ground_truth: COCO's images, annotations and categories.
        results: In COCO's results format, with boxes, masks or both. Sizes are those of boxes for boxes, and those of
            masks for masks, as COCO has them in two files.
    """
    categories = sorted(Category(record["id"], record["name"]) for record in ground_truth["categories"])
    objects = Counter(record["category_id"] for record in ground_truth["annotations"] if not record["iscrowd"])
    counts = [objects[category.id] for category in categories]
    evaluation = DetectionEvaluation({}, {}, categories, counts, images=len(ground_truth["images"]))
    for kind, iou_type in IOU_TYPES.items():
        chosen = results_of(kind, results)
        if chosen or not results:
            evaluation.metrics[kind], evaluation.class_ap[kind] = _evaluate(ground_truth, chosen, iou_type)
    return evaluation


def results_of(kind: str, results: Sequence[Record]) -> list[Record]:
    """Return the boxes or the masks of results, without the other: pycocotools would take the area from it."""
    (other,) = (field for name, field in FIELDS.items() if name != kind)
    return [{name: value for name, value in one.items() if name != other} for one in results if FIELDS[kind] in one]


def _evaluate(ground_truth: Record, results: list[Record], iou_type: str) -> tuple[dict[str, float], list[float]]:
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
    remedy = "name results in COCO's format with --results"
    results = []
    for file in files:
        try:
            content = read_json(file)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"no file at {file}: {remedy}") from error
        except ValueError as error:
            raise ValueError(f"{file} is not valid JSON ({error}): {remedy}") from error
        if not isinstance(content, list):
            raise ValueError(f"{file} holds no list: {remedy}")
        for place, result in enumerate(content):
            if problem := _result_problem(result, images, categories):
                raise ValueError(f"result {place} of {file} {problem}")
        results += content
    return results


def _result_problem(result: Any, images: dict[Any, Record], categories: set[Any]) -> str:
    """Return why a result cannot be evaluated, as a sentence without its subject; "" if it can be."""
    if not isinstance(result, dict) or not {"image_id", "category_id", "score"} <= result.keys():
        return "lacks image_id, category_id or score: write it in COCO's results format"
    image, category, score = result["image_id"], result["category_id"], result["score"]
    if not are_numbers([score]):
        return f"has the score {score!r:.100}: it should be a number"
    for number, kind, known in ((image, "image", images), (category, "category", categories)):
        if not isinstance(number, int) or number not in known:
            return (
                f"is for {kind} {number!r:.100}, which the data do not have: evaluate it on the data that it was made "
                "for"
            )
    if not result.keys() & set(FIELDS.values()):
        return f"has neither {' nor '.join(FIELDS.values())}: write it in COCO's results format"
    if "bbox" in result and (problem := box_problem(result["bbox"])):
        return problem
    rle = result.get("segmentation")
    if "segmentation" in result and not (isinstance(rle, dict) and isinstance(rle.get("counts"), str)):
        return "has a segmentation that is not a compressed RLE, as in COCO's results format: convert it"
    return rle_problem(rle, images[image]) if "segmentation" in result else ""
