"""Prediction of labels: what is found and written. See also tests/tasks/test_every_task_drawing.py."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import Tensor, nn

from inlinevit.data.images import ImageFiles
from inlinevit.engine.predictor import predict as predict_files
from inlinevit.engine.predictor import predict_command
from inlinevit.engine.results import Prediction
from inlinevit.tasks.segmentation import predictor as predictor_module
from inlinevit.tasks.segmentation.config import (
    InferenceConfig,
    InferenceOptions,
    SegmentationAugmentConfig,
    SegmentationConfig,
    SegmentationPredictOptions,
)
from inlinevit.tasks.segmentation.labels import LabelMap
from inlinevit.tasks.segmentation.predictor import SegmentationPredictor, in_windows_if_large, make_label_map
from inlinevit.tasks.segmentation.task import Segmentation
from inlinevit.tasks.segmentation.visualize import LEGEND_WIDTH
from tests.tasks.segmentation.runs import CLASSES

UNCHANGED = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


class Colours(nn.Module):
    """Takes the strongest colour of a pixel for its class."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, ...]] = []

    def forward(self, images: Tensor) -> Tensor:
        self.sizes.append(tuple(images.shape[-2:]))
        return images


def make_predictor() -> SegmentationPredictor:
    config = SegmentationConfig(
        inference=InferenceConfig(min_size=None), augment=SegmentationAugmentConfig(crop_size=64)
    )
    return SegmentationPredictor(Colours(), "colours", config, LabelMap.from_plain(CLASSES, "here"), UNCHANGED)


@pytest.fixture
def segmenter() -> SegmentationPredictor:
    return make_predictor()


def predict(segmenter: SegmentationPredictor, files: ImageFiles, **inference: Any) -> Iterator[Prediction]:
    options = SegmentationPredictOptions(output="unused", inference=InferenceOptions(**inference))
    return predict_files(segmenter, files, options, "cpu")


def patch(width: int = 60, height: int = 40) -> Image.Image:
    """A red image with a green patch near its top left, and a blue edge below."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = 200
    pixels[4:10, 6:18] = (0, 200, 0)
    pixels[-2:] = (0, 0, 200)
    return Image.fromarray(pixels)


def test_what_is_found(segmenter: SegmentationPredictor, tmp_path: Path) -> None:
    patch().save(tmp_path / "a.png")
    (found,) = predict(segmenter, ImageFiles([str(tmp_path)]))
    expected = np.zeros((40, 60), np.uint8)
    expected[4:10, 6:18] = 1
    expected[-2:] = 2
    assert np.array_equal(found.result, expected)
    (found,) = predict(segmenter, ImageFiles([str(tmp_path)]), window_size=16, scales=[1.0, 2.0], flip=True)
    assert np.array_equal(found.result, expected)
    assert set(segmenter.model.sizes[1:]) == {(16, 16)}  # type: ignore[index]


def test_large_images_are_seen_in_windows(
    segmenter: SegmentationPredictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(300, 200).save(tmp_path / "a.png")
    files = ImageFiles([str(tmp_path)])
    model = segmenter.model
    assert isinstance(model, Colours)
    (whole,) = predict(segmenter, files)
    assert model.sizes == [(200, 300)]
    monkeypatch.setattr(predictor_module, "MOST_AT_ONCE", 200 * 300 - 1)
    (found,) = predict(segmenter, files)
    # As large as what the model has seen in training.
    assert set(model.sizes[1:]) == {(64, 64)}
    assert np.array_equal(found.result, whole.result)
    # A window that was named stays.
    list(predict(segmenter, files, window_size=100))
    assert model.sizes[-1] == (100, 100)


def test_what_counts_is_how_large_the_model_sees_an_image() -> None:
    huge, strip = Image.new("L", (6000, 4000)), Image.new("L", (40, 4000))
    assert in_windows_if_large(InferenceConfig(min_size=512), huge, 512).window_size is None
    assert in_windows_if_large(InferenceConfig(min_size=None), huge, 512).window_size == 512
    assert in_windows_if_large(InferenceConfig(min_size=512, scales=[1.0, 4.0]), huge, 512).window_size == 512
    assert in_windows_if_large(InferenceConfig(min_size=512), strip, 512).window_size == 512


def test_images_larger_than_pillow_likes(
    segmenter: SegmentationPredictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch().save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    (found,) = predict(segmenter, ImageFiles([str(tmp_path)]))
    assert found.error is None
    assert Image.MAX_IMAGE_PIXELS == 100
    segmenter.max_pixels = 2000
    (found,) = predict(segmenter, ImageFiles([str(tmp_path)]))
    assert "2400 pixels" in (found.error or "")


def test_what_is_written(
    segmenter: SegmentationPredictor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Segmentation, "load_predictor", lambda model, options: segmenter)
    patch().save(tmp_path / "a.png")
    output = tmp_path / "out"
    options = SegmentationPredictOptions(output=str(output), device="cpu")
    assert predict_command(Segmentation, "run", [str(tmp_path / "a.png")], options) == 0
    (told,) = json.loads((output / "predictions.json").read_text(encoding="utf-8"))
    assert [one["name"] for one in told["classes"]] == ["red", "blue", "green [b]"]
    assert [one["share"] for one in told["classes"]] == pytest.approx([0.92, 0.05, 0.03])
    # The values of the training data.
    stored = Image.open(output / "a_labels.png")
    assert (stored.mode, stored.size) == ("L", (60, 40))
    values = np.array(stored)
    assert (values[20, 20], values[6, 10], values[39, 0]) == (7, 2, 9)
    assert set(np.unique(values).tolist()) == {2, 7, 9}
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path}/a.png: red 92 %, blue 5 %, green [b] 3 %"]
    # A legend is below.
    assert Image.open(output / "a_overlay.png").size == (60, 40)
    assert Image.open(output / "a_legend.png").width == LEGEND_WIDTH


def test_label_maps_have_16_bits_where_values_need_them(tmp_path: Path) -> None:
    records = [{"name": "a", "values": [7]}, {"name": "b", "values": [40_000, 3]}]
    labels = LabelMap.from_plain({"ignored": [0], "classes": records}, "here")
    indices = np.zeros((600, 4), np.uint8)
    indices[300:] = 1
    make_label_map(indices, labels).save(tmp_path / "a.png")
    values = np.array(Image.open(tmp_path / "a.png"))
    assert values.shape == (600, 4)
    assert (values[:300] == 7).all()
    assert (values[300:] == 40_000).all()
    # They can be read back as the labels that they are.
    assert np.array_equal(labels.to_indices(values).numpy(), indices)
