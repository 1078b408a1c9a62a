"""Detectors that are ready to use, from a training run; and stored results in place of a detector."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...data.pixels import AnyImage, PixelFormat, image_to_tensor, preview
from ...engine.evaluator import EvalData
from ...engine.predictor import DrawingPredictor, Rendering
from ...engine.results import shorten_list
from ...engine.runs import Run, open_run
from ...utils.validation import require
from ..backbone import load_trained, mean_and_std
from ..pixels import make_pixel_format
from .coco import Category, CocoSource, Record
from .config import DetectionConfig, DetectionEvalOptions, DetectionPredictOptions
from .metrics import SCORE_THRESHOLD, DetectionEvaluator, detect, read_results, to_results
from .model import build_detector
from .visualize import draw_objects

CATEGORIES_JSON = "categories.json"
OBJECTS_SHOWN = 3


@dataclass
class DetectionPredictor(DrawingPredictor[list[Record]]):
    """A detector that is ready to use; its results are objects in COCO's results format, with names of categories.

    Attributes:
        config: The run that it comes from.
        categories: The categories of its labels 1, 2, …, with the ids of the data that it was trained on.
    """

    config: DetectionConfig
    categories: list[Category]

    options_class = DetectionPredictOptions
    drawing_suffixes: ClassVar[dict[str, str]] = {"drawing": ".png"}

    @property
    def classes(self) -> list[str]:
        """The names of the categories: the first is that of label 1."""
        return [category.name for category in self.categories]

    @property
    def pixel_format(self) -> PixelFormat:
        return make_pixel_format(self.config.data, self.config.model.in_chans)

    @property
    def to_tensor(self) -> Callable[[AnyImage], Tensor]:
        """See Predictor.to_tensor; the detector, which takes a list of these, resizes and normalises them itself."""
        return float_tensor

    def predict_images(
        self, images: list[AnyImage], options: DetectionPredictOptions, device: torch.device
    ) -> list[list[Record] | None]:
        """See Predictor.predict_images; objects with at least the threshold, the highest score first."""
        return [self.find_objects(image, options.threshold, device) for image in images]

    def find_objects(self, image: AnyImage, threshold: float, device: torch.device) -> list[Record] | None:
        """Return the objects in an image; None if a score or a box is not finite."""
        answer = detect(self.model, image_to_tensor(image).to(device))
        if not all(bool(answer[name].isfinite().all()) for name in ("boxes", "scores")):
            return None
        chosen = {name: values[answer["scores"] >= threshold] for name, values in answer.items()}
        names = {category.id: category.name for category in self.categories}
        keys = ("category_id", "score", "bbox", "segmentation")
        results = to_results(chosen, 0, (image.height, image.width), self.categories)
        objects = [{"category": names[one["category_id"]], **{key: one[key] for key in keys}} for one in results]
        return sorted(objects, key=lambda one: one["score"], reverse=True)

    def render(self, image: AnyImage, result: list[Record]) -> Rendering:
        shown = [f"{one['category']} {100 * one['score']:.0f} %" for one in result]
        count = f"{len(result)} object{'' if len(result) == 1 else 's'}"
        summary = f"{count}{': ' if shown else ''}{shorten_list(shown, OBJECTS_SHOWN)}"
        drawing = draw_objects(preview(image), result, self.categories)
        return Rendering({"drawing": drawing}, {"objects": result}, summary)

    def description(self, options: Any) -> str:
        return f"{self.name}, {self.config.model.min_size} pixels"

    def settings(self, options: DetectionEvalOptions) -> dict[str, Any]:
        return {"results": options.results, "threshold": score_threshold(options)}

    def make_evaluator(self, data: EvalData, options: DetectionEvalOptions) -> DetectionEvaluator:
        """See Predictor.make_evaluator; categories are matched by name."""
        categories = match_categories(self.categories, data.source)
        return DetectionEvaluator(
            data.source,
            data.config.workers,
            categories=categories,
            keep_results=True,
            threshold=score_threshold(options),
        )


class StoredResults(DetectionPredictor):
    """Results in files, which are evaluated in place of a detector."""

    def __init__(self, files: Sequence[str]) -> None:
        super().__init__(nn.Identity(), ", ".join(files), DetectionConfig(), [])
        self.files = files

    def description(self, options: Any) -> str:
        return self.name

    def make_evaluator(self, data: EvalData, options: DetectionEvalOptions) -> DetectionEvaluator:
        results = read_results(self.files, data.source.ground_truth())
        return DetectionEvaluator(data.source, workers=0, results=results, threshold=score_threshold(options))


def score_threshold(options: DetectionEvalOptions) -> float:
    """Return the score from which a detection counts in the records of single images."""
    return SCORE_THRESHOLD if options.threshold is None else options.threshold


def load_detector(run: str, *, checkpoint: str | None = None) -> DetectionPredictor:
    """Load the detector of a training run.

    Args:
        run: The folder of the run.
        checkpoint: "best" for its best checkpoint, the folder of another one, or a file; None = the final weights.
    """
    opened: Run[DetectionConfig] = open_run(DetectionConfig, run)
    config, categories = opened.config.model, opened.metadata(CATEGORIES_JSON, parse_categories)
    num_classes = config.num_classes or len(categories)
    data = opened.config.data
    mean_std = mean_and_std(config, data)
    model = load_trained(opened, checkpoint, lambda bare: build_detector(bare, num_classes, mean_std))
    name = f"{config.arch} on {config.backbone}"
    return DetectionPredictor(model, name, opened.config, categories, max_pixels=data.max_pixels)


def float_tensor(image: AnyImage) -> Tensor:
    """Return an image as numbers from 0 to 1, (channels, height, width)."""
    return image_to_tensor(image).float() / 255


def parse_categories(records: Any) -> list[Category]:
    """Return the categories that a run was trained on, in the order of their labels."""
    if not isinstance(records, list) or not records:
        raise ValueError("it is not a list of categories")
    return [Category(int(record["id"]), str(record["name"])) for record in records]


def match_categories(known: Sequence[Category], source: CocoSource) -> list[Category]:
    """Return the categories of a source in the order of a model's labels. They are matched by name; ids may differ."""
    ours, theirs = [category.name for category in known], [category.name for category in source.categories]
    by_name = {category.name: category for category in source.categories}
    twice = [name for name in theirs if theirs.count(name) > 1]
    require(not twice, f"{source.file} has two categories called {twice[0] if twice else ''}: rename one of them")
    problems = []
    for text, names in (
        ("the model does not know {} of the images", [name for name in theirs if name not in ours]),
        ("the images do not have {} of the model", [name for name in ours if name not in by_name]),
    ):
        if names:
            count = f"{len(names)} {'category' if len(names) == 1 else 'categories'} ({shorten_list(names)})"
            problems.append(text.format(count))
    require(
        not problems,
        f"{' and '.join(problems)}: name images with the same categories with --data.path or --data.eval_annotations, "
        "or another run",
    )
    return [by_name[name] for name in ours]
