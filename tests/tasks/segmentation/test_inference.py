"""How a model looks at an image: windows, scales, mirror images, and all of it row by row."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms.v2.functional import resize

from inlinevit.tasks.segmentation import inference as inference_module
from inlinevit.tasks.segmentation.config import InferenceConfig, InferenceOptions
from inlinevit.tasks.segmentation.inference import (
    describe,
    normalize,
    predict_labels,
    resized_rows,
    spans,
)
from inlinevit.tasks.segmentation.inference import predict_probs as iter_probs

MEAN_STD = ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
UNCHANGED = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
CLASSES = 5


def predict_probs(*arguments: Any) -> Tensor:
    """The probabilities of the whole image."""
    return torch.cat(list(iter_probs(*arguments)), dim=1)


class Seeing(nn.Module):
    """Sees some pixels around, so that windows answer differently from the whole image; knows left from right."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.kernel = torch.randn(CLASSES, 3, 9, 9, generator=generator)
        self.sizes: list[tuple[int, ...]] = []

    def forward(self, images: Tensor) -> Tensor:
        self.sizes.append(tuple(images.shape[-2:]))
        # What is wider than a window is seen by all of its pixels.
        return F.conv2d(images, self.kernel, padding=4) / 9 + images.mean()


class Blind(nn.Module):
    """Takes the colours of a pixel for its logits."""

    def forward(self, images: Tensor) -> Tensor:
        return images


def noise(height: int, width: int) -> Tensor:
    return torch.randint(0, 256, (3, height, width), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def simple_probs(model: nn.Module, image: Tensor, inference: InferenceConfig) -> Tensor:
    """What `predict_probs` should give, with the logits of the whole image in memory."""
    height, width = image.shape[-2:]
    answers = []
    for scale in inference.scales:
        factor = scale * (1 if inference.min_size is None else inference.min_size / min(height, width))
        scaled = resize(image, [round(height * factor), round(width * factor)], antialias=True)
        high, wide = scaled.shape[-2:]
        for mirrored in (False, True)[: 1 + inference.flip]:
            logits, total = torch.zeros(CLASSES, high, wide), torch.zeros(high, wide)
            side = inference.window_size or max(high, wide)
            stride = inference.stride or side * 2 // 3
            for top in {min(top, max(high - side, 0)) for top in range(0, high, stride)}:
                for left in {min(left, max(wide - side, 0)) for left in range(0, wide, stride)}:
                    place = (..., slice(top, top + side), slice(left, left + side))
                    seen = normalize(scaled[place], *MEAN_STD)[None]
                    answer = model(seen.flip(-1)).flip(-1) if mirrored else model(seen)
                    down, right = (
                        0.5 - 0.5 * torch.cos(2 * math.pi * (torch.arange(n) + 0.5) / n) for n in seen.shape[-2:]
                    )
                    logits[place] += answer[0] * down[:, None] * right
                    total[place] += down[:, None] * right
            whole = F.interpolate((logits / total)[None], size=(height, width), mode="bilinear")[0]
            answers.append(whole.softmax(dim=0))
    return torch.stack(answers).mean(dim=0)


VIEWS = {
    "as it is": InferenceConfig(min_size=None),
    "resized": InferenceConfig(min_size=24),
    "enlarged": InferenceConfig(min_size=90),
    "windows": InferenceConfig(min_size=None, window_size=16),
    "dense windows": InferenceConfig(min_size=None, window_size=16, stride=5),
    "windows side by side": InferenceConfig(min_size=None, window_size=16, stride=16),
    "resized, in windows": InferenceConfig(min_size=33, window_size=17),
    "scales and mirror images": InferenceConfig(min_size=30, scales=[0.5, 1.0, 1.75], flip=True),
    "all of it": InferenceConfig(min_size=36, window_size=20, stride=11, scales=[0.5, 1.25], flip=True),
}


@pytest.mark.parametrize("inference", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("pixels_at_once", [400, 10**6])
def test_row_by_row_is_the_same_as_the_simple_way(
    inference: InferenceConfig, pixels_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference_module, "PIXELS_AT_ONCE", pixels_at_once)
    model, image = Seeing(), noise(45, 61)
    probabilities = predict_probs(model, image, inference, MEAN_STD)
    assert probabilities.shape == (CLASSES, 45, 61)
    torch.testing.assert_close(probabilities, simple_probs(model, image, inference), atol=1e-5, rtol=1e-4)
    labels = predict_labels(model, image, inference, MEAN_STD)
    assert labels.dtype == torch.uint8
    assert torch.equal(labels, probabilities.argmax(dim=0).to(torch.uint8))


@pytest.mark.parametrize("inference", VIEWS.values(), ids=VIEWS.keys())
def test_how_many_rows_come_at_a_time_is_of_no_matter(
    inference: InferenceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, image = Seeing(), noise(45, 61)
    whole = predict_probs(model, image, inference, MEAN_STD)
    monkeypatch.setattr(inference_module, "PIXELS_AT_ONCE", 7 * 61)
    rows = list(iter_probs(model, image, inference, MEAN_STD))
    assert [part.shape[1] for part in rows] == [7] * 6 + [3]
    again = torch.cat(rows, dim=1)
    # The last bit of an exponential may depend on how many there are.
    torch.testing.assert_close(again, whole, atol=1e-6, rtol=0)
    assert torch.equal(again.argmax(dim=0), whole.argmax(dim=0))


@pytest.mark.parametrize("size", [(40, 40), (40, 30), (12, 40), (7, 9)])
def test_one_window_is_the_whole_image(size: tuple[int, int]) -> None:
    model, image = Seeing(), noise(*size)
    whole = predict_probs(model, image, InferenceConfig(min_size=None), MEAN_STD)
    for window in (40, 41, 1000):
        one = predict_probs(model, image, InferenceConfig(min_size=None, window_size=window), MEAN_STD)
        torch.testing.assert_close(one, whole, atol=1e-5, rtol=0)
    several = predict_probs(model, image, InferenceConfig(min_size=None, window_size=6), MEAN_STD)
    assert (several - whole).abs().max() > 0.01
    assert {one for one in model.sizes if max(one) > 6} == {size}


def test_all_windows_are_of_one_size() -> None:
    model = Seeing()
    predict_labels(model, noise(45, 61), InferenceConfig(min_size=None, window_size=16, stride=10), MEAN_STD)
    assert model.sizes == [(16, 16)] * 4 * 6


@pytest.mark.parametrize(("length", "window", "stride"), [(100, 30, None), (100, 30, 30), (100, 30, 1), (31, 30, 20)])
def test_shares_of_a_pixel_sum_to_one(length: int, window: int, stride: int | None) -> None:
    total = torch.zeros(length)
    found = spans(length, InferenceConfig(window_size=window, stride=stride))
    for start, shares in found:
        assert len(shares) == window
        assert 0 < shares.min() <= shares.max() <= 1
        total[start : start + window] += shares
    torch.testing.assert_close(total, torch.ones(length), atol=1e-6, rtol=0)
    starts = [start for start, _ in found]
    assert starts[0] == 0
    assert starts[-1] == length - window
    assert max(b - a for a, b in itertools.pairwise(starts)) <= (stride or 20)


def test_the_usual_stride() -> None:
    assert [start for start, _ in spans(2048, InferenceConfig(window_size=512))] == [0, 341, 682, 1023, 1364, 1536]


def test_answers_count_less_towards_the_border_of_a_window() -> None:
    first, second = spans(50, InferenceConfig(window_size=30, stride=20))
    overlap = first.shares[20:]
    assert (overlap.diff() < 0).all()
    assert overlap[0] > 0.99
    assert overlap[-1] < 0.01
    torch.testing.assert_close(overlap + second.shares[:10], torch.ones(10))
    # Where there is no other window, an image's border counts as much as its middle.
    assert torch.equal(first.shares[:20], torch.ones(20))


@pytest.mark.parametrize("kind", ["constant", "linear"])
def test_no_seam_is_seen(kind: str) -> None:
    height, width = 90, 200
    image = torch.full((3, height, width), 77, dtype=torch.uint8)
    if kind == "linear":
        image[0] = torch.arange(width)
        image[1] = 2 * torch.arange(height)[:, None]
    inference = InferenceConfig(min_size=None, window_size=32)
    probabilities = predict_probs(Blind(), image, inference, UNCHANGED)
    torch.testing.assert_close(probabilities, (image / 255).softmax(dim=0), atol=1e-6, rtol=0)
    # The border between two classes goes on from window to window.
    assert torch.equal(predict_labels(Blind(), image, inference, UNCHANGED), image.argmax(dim=0).to(torch.uint8))


def test_mirror_images_make_the_answer_even_handed() -> None:
    model, image = Seeing(), noise(45, 61)
    for window in (None, 61):
        inference = InferenceConfig(min_size=None, window_size=window, flip=True)
        answer, mirrored = (
            predict_probs(model, image, inference, MEAN_STD),
            predict_probs(model, image.flip(-1), inference, MEAN_STD),
        )
        torch.testing.assert_close(mirrored.flip(-1), answer)
    plain = InferenceConfig(min_size=None)
    assert (
        predict_probs(model, image.flip(-1), plain, MEAN_STD).flip(-1) - predict_probs(model, image, plain, MEAN_STD)
    ).abs().max() > 0.01


@pytest.mark.parametrize("flip", [False, True])
def test_the_first_rows_come_before_the_last_windows_are_seen(flip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_module, "PIXELS_AT_ONCE", 5 * 24)
    model = Seeing()
    inference = InferenceConfig(min_size=None, window_size=12, stride=12, scales=[1.0, 2.0], flip=flip)
    rows = iter_probs(model, noise(240, 24), inference, MEAN_STD)
    next(rows)
    # A row of windows for each scale: two of them, and four.
    assert len(model.sizes) == (1 + flip) * (2 + 4)
    list(rows)
    assert len(model.sizes) == (1 + flip) * (2 * 20 + 4 * 40)


def test_little_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an image that is many windows high, never more than about two rows of windows."""
    monkeypatch.setattr(inference_module, "PIXELS_AT_ONCE", 5 * 24)
    stores: list[Any] = []
    make = inference_module.RowStore.__init__

    def remembered(self: Any, strips: Any) -> None:
        stores.append(self)
        make(self, strips)

    monkeypatch.setattr(inference_module.RowStore, "__init__", remembered)
    inference = InferenceConfig(min_size=None, window_size=12, scales=[0.7, 1.0], flip=True)
    for _ in iter_probs(Seeing(), noise(240, 24), inference, MEAN_STD):
        assert len(stores) == 4
        assert all(sum(strip.shape[1] for _, strip in store.held) <= 24 for store in stores)
    assert all(store.held == [] for store in stores)


@pytest.mark.parametrize("before", [(20, 31), (7, 7), (64, 90), (40, 50), (1, 1)])
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_rows_are_resized_as_all_of_them(before: tuple[int, int], rows: int) -> None:
    logits = torch.randn(4, *before, generator=torch.Generator().manual_seed(0))
    cut: Callable[[], Any] = lambda: iter(logits.split(3, dim=1))  # noqa: E731
    resized = torch.cat(list(resized_rows(cut(), before[0], (40, 50), rows)), dim=1)
    expected = F.interpolate(logits[None], size=(40, 50), mode="bilinear", align_corners=False)[0]
    torch.testing.assert_close(resized, expected, atol=1e-5, rtol=1e-5)
    if before == (40, 50):
        assert torch.equal(resized, logits)


def test_images_are_normalised() -> None:
    image = noise(4, 5)
    expected = (image[1].float() / 255 - 0.4) / 0.3
    torch.testing.assert_close(normalize(image, *MEAN_STD)[1], expected)


def test_what_is_not_said_is_as_in_the_run() -> None:
    run = InferenceConfig(min_size=300, window_size=200, stride=100, scales=[0.5, 1.0], flip=True)
    assert InferenceOptions().applied_to(run) == run
    assert InferenceOptions().applied_to(InferenceConfig()) == InferenceConfig()
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"min_size": 512}, {"min_size": 512}),
        ({"min_size": "original"}, {"min_size": None}),
        ({"window_size": "whole"}, {"window_size": None, "stride": None}),
        ({"window_size": 512}, {"window_size": 512, "stride": None}),
        ({"window_size": 512, "stride": 7}, {"window_size": 512, "stride": 7}),
        ({"stride": 7}, {"stride": 7}),
        ({"scales": [1.0]}, {"scales": [1.0]}),
        ({"flip": False}, {"flip": False}),
    ]
    for said, expected in cases:
        assert InferenceOptions(**said).applied_to(run) == InferenceConfig(**{**vars(run), **expected})
    with pytest.raises(ValueError, match="should not exceed"):
        InferenceOptions(window_size="whole", stride=3).applied_to(run)


def test_views_in_words() -> None:
    assert describe(InferenceConfig()) == "shorter side 512, whole images"
    inference = InferenceConfig(min_size=None, window_size=512, scales=[0.5, 1], flip=True)
    assert describe(inference) == "original size, windows of 512 every 341, scales 0.5 1, mirrored too"
