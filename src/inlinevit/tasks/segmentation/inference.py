"""Inference on an image: resized, in windows, at several scales, mirrored. Predictions come from top to bottom.

The probabilities of a whole image are not held in memory: 20,000 × 10,000 pixels in 150 classes would be 120 GB. Only
one row of windows is held for each scale.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms import v2

from ...engine.progress import nested_progress
from ..pixels import MeanStd
from .config import InferenceConfig
from .transforms import resize_image, scaled_size

# Probabilities are made for about so many pixels at a time.
PIXELS_AT_ONCE = 2**20
# From a window (channels, height, width) uint8 to its logits (classes, height, width).
Predict = Callable[[Tensor], Tensor]


def describe(inference: InferenceConfig) -> str:
    """Return inference settings in words, for the titles of tables."""
    size, window = inference.min_size, inference.window_size
    words = ["original size" if size is None else f"shorter side {size}"]
    words += ["whole images" if window is None else f"windows of {window} every {stride_of(inference)}"]
    if inference.scales != [1.0]:
        words += [f"scales {' '.join(f'{scale:g}' for scale in inference.scales)}"]
    return ", ".join([*words, "mirrored too"] if inference.flip else words)


def normalize(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Normalise images (…, channels, height, width) uint8."""
    return v2.functional.normalize(images / 255, list(mean), list(std))


def predict_labels(
    model: nn.Module, image: Tensor, inference: InferenceConfig, mean_std: MeanStd, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the most probable class of each pixel, (height, width) uint8 on the device; see `predict_probs`."""
    rows = predict_probs(model, image, inference, mean_std, device)
    return torch.cat([probabilities.argmax(dim=0).to(torch.uint8) for probabilities in rows])


def predict_probs(
    model: nn.Module, image: Tensor, inference: InferenceConfig, mean_std: MeanStd, device: torch.device | str = "cpu"
) -> Iterator[Tensor]:
    """Yield the class probabilities of an image, some rows at a time, from top to bottom: (classes, rows, width).

    Logits are blended where windows overlap, and resized to the size of the image; their softmax is averaged over
    scales and mirror images. All of these are processed side by side, and hold one row of windows each.

    Args:
        model: In evaluation mode, on the device: normalised images to logits of the same height and width.
        image: (channels, height, width) uint8; it is resized where it is, as in training.
        inference: Inference settings.
        mean_std: What the model's images are normalised by.
        device: Where to compute.
    """
    height, width = image.shape[-2:]
    rows = max(1, PIXELS_AT_ONCE // width)
    tta_views = []
    with nested_progress("image", count_windows(height, width, inference), "windows") as advance:
        for scale in inference.scales:
            size = scaled_size(height, width, inference.min_size, scale)
            scaled = image if size == [height, width] else resize_image(image, size)
            for mirrored in (False, True) if inference.flip else (False,):
                predict = partial(window_logits, model, mean_std, device, mirrored, advance=advance)
                tta_views.append(
                    resized_rows(blended_strips(predict, scaled, inference), size[0], (height, width), rows)
                )
        for _ in range(0, height, rows):
            total = next(tta_views[0]).softmax(dim=0)
            for tta_view in tta_views[1:]:
                total += next(tta_view).softmax(dim=0)
            yield total / len(tta_views)


@torch.no_grad()
def window_logits(
    model: nn.Module,
    mean_std: MeanStd,
    device: torch.device | str,
    mirrored: bool,
    window: Tensor,
    advance: Callable[[], None],
) -> Tensor:
    """Return the logits (classes, height, width) of a window (channels, height, width), or by its mirror image."""
    images = normalize(window.to(device), *mean_std)[None]
    logits = model(images.flip(-1)).flip(-1) if mirrored else model(images)
    advance()
    return logits[0].float()


class Span(NamedTuple):
    """A window along one side of an image: its first pixel, and the weight of its logits at each of its pixels."""

    start: int
    shares: Tensor


def stride_of(inference: InferenceConfig) -> int:
    """Return the stride of windows: two thirds of a window by default."""
    assert inference.window_size is not None
    return inference.stride or max(1, inference.window_size * 2 // 3)


def window_starts(length: int, inference: InferenceConfig) -> list[int]:
    """Return the first pixel of each window along a side of an image. The last one is moved inwards."""
    side = length if inference.window_size is None else min(inference.window_size, length)
    return [0] if side == length else [*range(0, length - side, stride_of(inference)), length - side]


def count_windows(height: int, width: int, inference: InferenceConfig) -> int:
    """Return how often the model is called for an image of this height and width: windows of all scales and flips."""
    sizes = [scaled_size(height, width, inference.min_size, scale) for scale in inference.scales]
    windows = [len(window_starts(rows, inference)) * len(window_starts(columns, inference)) for rows, columns in sizes]
    return sum(windows) * (2 if inference.flip else 1)


def spans(length: int, inference: InferenceConfig) -> list[Span]:
    """Windows along a side of an image. The last one is moved inwards, so that all are of one size.

    Logits count less towards the borders of a window, where there is less context. Over all windows, the shares of a
    pixel sum to 1.
    """
    side = length if inference.window_size is None else min(inference.window_size, length)
    starts = window_starts(length, inference)
    places = (torch.arange(side, dtype=torch.float64) + 0.5) / side
    # A raised cosine: nowhere 0, so that every pixel has a weight.
    weights = torch.sin(math.pi * places) ** 2
    total = torch.zeros(length, dtype=torch.float64)
    for start in starts:
        total[start : start + side] += weights
    return [Span(start, (weights / total[start : start + side]).float()) for start in starts]


def blended_strips(predict: Predict, image: Tensor, inference: InferenceConfig) -> Iterator[Tensor]:
    """Yield the logits of an image from top to bottom, in strips (classes, rows, width), each from a row of windows.

    Args:
        predict: From a window to its logits.
        image: (channels, height, width) uint8, already resized.
        inference: Its windows; nothing else of it counts here.
    """
    height, width = image.shape[-2:]
    down, right = spans(height, inference), spans(width, inference)
    ends = [span.start for span in down[1:]] + [height]
    unfinished: Tensor | None = None
    for span, end in zip(down, ends, strict=True):
        strip = row_of_windows(predict, image[:, span.start : span.start + len(span.shares)], right)
        strip *= span.shares.to(strip.device)[:, None]
        if unfinished is not None:
            strip[:, : unfinished.shape[1]] += unfinished
        finished = end - span.start
        unfinished = strip[:, finished:].clone()
        # The strip is large: only the caller should hold a reference to it.
        handed_out = [strip[:, :finished]]
        del strip
        yield handed_out.pop()


def row_of_windows(predict: Predict, image: Tensor, right: list[Span]) -> Tensor:
    """Return the logits (classes, height, width) of a strip of an image that is as high as a window."""
    strip: Tensor | None = None
    for start, shares in right:
        place = slice(start, start + len(shares))
        logits = predict(image[:, :, place])
        if strip is None:
            strip = logits.new_zeros(*logits.shape[:2], image.shape[-1])
        strip[:, :, place].addcmul_(logits, shares.to(logits.device))
    assert strip is not None
    return strip


class RowStore:
    """Rows of strips (classes, rows, width) that come from top to bottom, kept while they are needed."""

    def __init__(self, strips: Iterator[Tensor]) -> None:
        self.strips = strips
        self.held: list[tuple[int, Tensor]] = []
        self.end = 0

    def take(self, first: int, end: int, needed_from: int) -> Tensor:
        """Return the rows from `first` to before `end`; those before `needed_from` will not be needed any more."""
        while self.end < end:
            strip = next(self.strips)
            self.held.append((self.end, strip))
            self.end += strip.shape[1]
        parts = [strip[:, max(0, first - top) : max(0, end - top)] for top, strip in self.held]
        self.held = [(top, strip) for top, strip in self.held if top + strip.shape[1] > needed_from]
        return torch.cat(parts, dim=1)


def resized_rows(strips: Iterator[Tensor], height: int, size: tuple[int, int], rows: int) -> Iterator[Tensor]:
    """Logits resized to the size of the image, so many rows at a time: (classes, rows, width).

    The same as F.interpolate of them all, bilinear and without aligned corners.

    Args:
        strips: The logits, from top to bottom.
        height: Rows that they have together.
        size: Height and width of the image.
        rows: How many rows to give at a time; the last ones may be fewer.
    """
    store = RowStore(strips)
    # Between which two rows of logits a row of the image lies, and how near it is to the second.
    places = ((torch.arange(size[0], dtype=torch.float64) + 0.5) * height / size[0] - 0.5).clamp(min=0)
    above = places.long()
    below = (above + 1).clamp(max=height - 1)
    nearness = (places - above).float()
    for top in range(0, size[0], rows):
        bottom = min(top + rows, size[0])
        first, end = int(above[top]), int(below[bottom - 1]) + 1
        here = slice(top, bottom)
        # Large tensors get no names here: a name would keep them alive.
        yield _resized(
            store.take(first, end, int(above[bottom]) if bottom < size[0] else height),
            above[here] - first,
            below[here] - first,
            nearness[here],
            size[1],
        )


def _resized(logits: Tensor, above: Tensor, below: Tensor, nearness: Tensor, width: int) -> Tensor:
    device = logits.device
    upper, lower = logits[:, above.to(device)], logits[:, below.to(device)]
    between = torch.lerp(upper, lower, nearness.to(device)[:, None])
    if width == between.shape[-1]:
        return between
    return F.interpolate(between[None], size=(len(above), width), mode="bilinear", align_corners=False)[0]
