"""The explorer: answers the questions of the page about one image and several models."""

import base64
import io
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .. import __version__
from ..analysis.confusion import DELTA, EPSILON
from ..report import STYLES
from ..utils.validation import require
from .capture import Capture, capture, masked_logits, masked_sides
from .pictures import (
    MOST_PIXELS,
    MOST_UPLOAD_BYTES,
    Sample,
    clean_name,
    drawn_samples,
    fashion_samples,
    read_picture,
    to_inputs,
    to_png,
)
from .rows import KINDS, QueryRow, query_row
from .subjects import Subject, weights_notice

# Classes of a prediction that are shown.
TOP = 5
FLOAT_DIGITS = 6


class StaleImageError(ValueError):
    """A question about an image that was replaced by another one."""


@dataclass
class Picture:
    """The image that is explored.

    Attributes:
        number: Counts the images of a process.
        title: What is shown.
        inputs: Of each model, (channels, H, W), on its device.
        captures: Of each model.
    """

    number: int
    title: str
    inputs: list[Tensor]
    captures: list[Capture]


class Explorer:
    """Keeps models and what they computed from the last image. Its methods may be called from several threads.

    Args:
        subjects: The models.
        samples: Further pictures that are offered, before those of this package.
        max_pixels: Pictures with more pixels are refused.
    """

    def __init__(
        self, subjects: Sequence[Subject], *, samples: Sequence[Sample] = (), max_pixels: int = MOST_PIXELS
    ) -> None:
        self.subjects = list(subjects)
        self.max_pixels = max_pixels
        embedded = fashion_samples() if any(subject.is_fashion_mnist for subject in subjects) else []
        self.samples = [*samples, *embedded, *drawn_samples()]
        # One picture is opened at a time, and one model runs at a time; clicks wait for neither.
        self._opening, self._running, self._lock = threading.Lock(), threading.Lock(), threading.Lock()
        self._picture: Picture | None = None
        self._count = 0

    def state(self) -> dict[str, Any]:
        """Return what the page shows before there is an image."""
        return {
            "mode": "live",
            "version": __version__,
            "models": [describe_subject(subject) for subject in self.subjects],
            "samples": [{"title": sample.title} for sample in self.samples],
            "notice": weights_notice(self.subjects),
            "epsilon": EPSILON,
            "delta": DELTA,
            "limits": {"bytes": MOST_UPLOAD_BYTES, "pixels": self.max_pixels},
        }

    def open_bytes(self, content: bytes, name: str) -> dict[str, Any]:
        """Open an uploaded picture; see describe_picture.

        Raises:
            ValueError: It cannot be used. The image before it stays.
        """
        with self._opening:
            specs = [subject.predictor.spec for subject in self.subjects]
            return self._open(read_picture(content, name, specs, self.max_pixels), clean_name(name))

    def open_sample(self, index: int) -> dict[str, Any]:
        """Open one of the samples; see describe_picture."""
        require(0 <= index < len(self.samples), f"there is no sample {index}: choose one of {len(self.samples)}")
        sample = self.samples[index]
        loaded = sample.load()
        if not isinstance(loaded, Image.Image):
            return self.open_bytes(loaded, sample.title)
        with self._opening:
            return self._open(to_inputs(loaded, [subject.predictor.spec for subject in self.subjects]), sample.title)

    def _open(self, inputs: list[Tensor], title: str) -> dict[str, Any]:
        # Before the new image takes memory. This also ends what is still computed for the old one.
        self.close()
        moved, captures = [], []
        with self._running:
            for subject, pixels in zip(self.subjects, inputs, strict=True):
                model = subject.predictor.model
                moved.append(pixels.to(next(model.parameters()).device))
                try:
                    captures.append(capture(model, moved[-1]))
                except ValueError as error:
                    raise ValueError(f"{subject.label} cannot be explored: {error}") from error
        with self._lock:
            self._count += 1
            self._picture = picture = Picture(self._count, title, moved, captures)
        return self.describe_picture(picture)

    def close(self) -> None:
        """Forget the image; computations about it end soon."""
        with self._lock:
            self._picture = None

    def describe_picture(self, picture: Picture) -> dict[str, Any]:
        """Return its number and title and, of each model, layers, prediction and which neighbourhoods can be hidden."""
        models = []
        for index, (subject, found) in enumerate(zip(self.subjects, picture.captures, strict=True)):
            models.append(
                {
                    "picture": f"api/picture/{picture.number}/{index}.png",
                    "prediction": top_classes(found.logits, subject.predictor.classes),
                    "layers": [
                        {
                            "name": layer.name,
                            "attention": layer.attention,
                            "size": list(layer.size),
                            "heads": layer.q.shape[1],
                            "local": layer.convolution is not None,
                        }
                        for layer in found.layers
                    ],
                    "sides": masked_sides(found),
                    "no_sides": why_not_masked(found),
                    "reduced": found.reduced,
                }
            )
        return {"image": picture.number, "title": picture.title, "models": models}

    def _find(self, image: int, model: int) -> tuple[Picture, Capture, Subject]:
        picture = self._picture
        if picture is None or picture.number != image:
            raise StaleImageError("another picture was opened since, perhaps in another window: choose yours again")
        require(0 <= model < len(self.subjects), f"there is no model {model}: there are {len(self.subjects)}")
        return picture, picture.captures[model], self.subjects[model]

    @torch.no_grad()
    def rows(
        self, image: int, model: int, layer: int, query: tuple[int, int], *, only_own: bool = False
    ) -> dict[str, Any]:
        """Return the weights of one query in one layer, by kind of attention; see encode_row."""
        started = time.perf_counter()
        with self._lock:
            _, found, _ = self._find(image, model)
            require(0 <= layer < len(found.layers), f"there is no layer {layer}: there are {len(found.layers)}")
            chosen = found.layers[layer]
            height, width = chosen.size
            require(
                0 <= query[0] < height and 0 <= query[1] < width,
                f"there is no query at {query}: the map has {height} × {width} tokens",
            )
            kinds = [chosen.attention] if only_own else list(dict.fromkeys((*KINDS, chosen.attention)))
            with one_thread():
                columns = [encode_row(query_row(chosen, query, kind)) for kind in kinds]
        return {
            "layer": layer,
            "query": list(query),
            "size": [height, width],
            "columns": columns,
            "milliseconds": round(1000 * (time.perf_counter() - started), 2),
        }

    @torch.no_grad()
    def locality(self, image: int, model: int) -> dict[str, Any]:
        """Return the weight of the 3×3 neighbourhood in each layer of a model."""
        layers = []
        for index in range(len(self.capture_of(image, model).layers)):
            # Not under the lock, so that clicks are answered meanwhile; it ends when another image is opened.
            with one_thread():
                one = self.capture_of(image, model).locality(index)
            weights = {kind: round(value, FLOAT_DIGITS) for kind, value in one.weights.items()}
            layers.append({"uniform": one.uniform, "weights": weights, "total": round(one.total, FLOAT_DIGITS)})
        return {"layers": layers}

    @torch.no_grad()
    def hidden(self, image: int, model: int, side: int) -> dict[str, Any]:
        """Return the prediction with each query's neighbourhood, or as many random tokens, hidden in all layers."""
        with self._lock:
            picture, found, subject = self._find(image, model)
        allowed = masked_sides(found)
        require(side in allowed, why_not_masked(found) or f"side is {side}: choose one of {allowed}")
        # Takes seconds for large maps, in which clicks are answered; it ends when another image is opened.
        with self._running:
            check = partial(self._find, image, model)
            logits = masked_logits(subject.predictor.model, picture.inputs[model], side, check)
        return {name: top_classes(some, subject.predictor.classes) for name, some in logits.items()}

    def capture_of(self, image: int, model: int) -> Capture:
        """Return what a model computed from the image."""
        with self._lock:
            return self._find(image, model)[1]

    def png(self, image: int, model: int) -> bytes:
        """Return what a model sees of the image, as a PNG file."""
        with self._lock:
            picture, _, subject = self._find(image, model)
            return to_png(picture.inputs[model], subject.predictor.spec)

    def sample_png(self, index: int, side: int = 96) -> bytes:
        """Return a small picture of a sample, as a PNG file."""
        require(0 <= index < len(self.samples), f"there is no sample {index}: choose one of {len(self.samples)}")
        sample = self.samples[index]
        loaded = sample.load()
        if isinstance(loaded, Image.Image):
            image = loaded.convert("RGB")
            image.thumbnail((side, side))
            buffer = io.BytesIO()
            image.save(buffer, "PNG", optimize=True)
            return buffer.getvalue()
        spec = self.subjects[0].predictor.spec
        with self._lock:
            return to_png(read_picture(loaded, sample.title, [spec], self.max_pixels)[0], spec)


@contextmanager
def one_thread() -> Iterator[None]:
    """A context in which torch computes in the calling thread only.

    Rows are so small that threads save little, and on a busy machine they wait for each other much longer.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe_subject(subject: Subject) -> dict[str, Any]:
    """Return what the page shows of a model."""
    return {
        "label": subject.label,
        "given": subject.given,
        "name": subject.predictor.name,
        "weights": subject.weights,
        "size": subject.predictor.spec.size,
    }


def why_not_masked(found: Capture) -> str:
    """Return why no neighbourhood can be hidden; "" if one can."""
    if masked_sides(found):
        return ""
    if found.reduced:
        return "some of its keys come from a reduced map, where queries have no neighbourhood"
    smallest = min(min(layer.size) for layer in found.layers)
    if smallest <= 3:
        return f"its smallest map has a side of {smallest}, too small to hide a neighbourhood"
    return "its maps have so many tokens that hiding would take minutes"


def top_classes(logits: Tensor, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Return the most probable classes, the most probable first; none if the model's output is not finite."""
    if not bool(logits.isfinite().all()):
        return []
    values, indices = logits.softmax(dim=0).topk(min(TOP, len(logits)))
    return [
        {"class": classes[index].split(",")[0], "index": index, "probability": round(value, 4)}
        for value, index in zip(values.tolist(), indices.tolist(), strict=True)
    ]


def encode_row(row: QueryRow, *, quantize: bool = False) -> dict[str, Any]:
    """Return the weights of a query as JSON values: maps in base64, by head and then row by row.

    They are float32 in little-endian order; or, quantized, bytes from -127 to 127 for -scale to scale of each head, and
    -128 for what is outside of the window. The page computes sums and adds the local weights.
    """
    weights = row.weights.float().flatten(1).cpu().numpy()
    encoded: dict[str, Any] = {
        "kind": row.kind,
        "name": STYLES[row.kind].name if row.kind in STYLES else row.kind,
        "own": row.is_own,
        "heads": len(weights),
        "prefix": rounded(row.prefix),
        "local": None if row.local is None else {"places": row.local.places, "weights": rounded(row.local.weights)},
        "confused": row.confused,
        "uniform": row.uniform,
    }
    if quantize:
        scales = np.nan_to_num(np.abs(weights)).max(axis=1, keepdims=True).clip(min=1e-30)
        steps = np.where(np.isnan(weights), -128, np.round(127 * np.nan_to_num(weights) / scales))
        encoded["scales"] = [float(f"{scale:.6g}") for scale in scales[:, 0]]
        packed = steps.astype(np.int8).tobytes()
    else:
        packed = weights.astype("<f4").tobytes()
    return {**encoded, "weights": base64.b64encode(packed).decode()}


def rounded(values: Tensor) -> list[list[float]]:
    """Return numbers with few digits."""
    return [[float(f"{value:.{FLOAT_DIGITS}g}") for value in some] for some in values.float().cpu().tolist()]
