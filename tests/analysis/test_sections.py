"""Verdicts follow from the numbers, also where those are not as expected."""

import json
import math

import numpy as np
import pytest
import torch

from inlinevit.analysis.confusion import Confusion, LayerConfusion
from inlinevit.analysis.locality import LayerLocality
from inlinevit.analysis.map_plots import View
from inlinevit.analysis.maps import AttentionMap
from inlinevit.analysis.masking import MaskedAccuracy, Masking
from inlinevit.analysis.sections import (
    Analysis,
    all_weights,
    analysis_sections,
    confusion_verdict,
    locality_verdict,
    masking_verdict,
    negative_fraction,
    short_percent,
    to_json,
)
from inlinevit.report import Picture, Table, Text


def analysis(attention, *, confused=0, near=0.2, added=0.0, losses=(20.0, 10.0), images=400, negative=0.0, label=None):
    """A model of two layers and one head on a map of 7×7 tokens."""
    uniform = 0.15
    layers = [LayerConfusion(f"blocks.{layer}", [1000, 1000], [confused, confused]) for layer in range(2)]
    locality = [
        LayerLocality(f"blocks.{layer}", (7, 7), uniform, near, near + added, near, near + added) for layer in range(2)
    ]
    masked = [MaskedAccuracy(3, "near", 80 - losses[0], 1.0), MaskedAccuracy(3, "random", 80 - losses[1], math.nan)]
    weights = torch.full((1, 7, 7), 0.02)
    weights[0, 0, 0], weights[0, 6, 6] = -negative, torch.nan
    maps = [AttentionMap(f"blocks.{layer}", (3, 3), weights, weights + added) for layer in range(2)]
    view = View(np.zeros((14, 14, 3), np.float32), (0.5, 0.5), maps)
    return Analysis(
        label or attention,
        attention,
        Confusion(0.01, 0.1, layers),
        locality,
        [view, view],
        Masking(images, 80.0, 0.5, masked),
    )


THREE = [analysis("softmax"), analysis("linear", confused=300, near=0.16), analysis("inline", added=0.3, negative=0.1)]


@pytest.mark.parametrize("analyses", [THREE, THREE[2:]], ids=["three", "one"])
def test_each_section_has_text_figures_and_a_verdict(analyses):
    sections = analysis_sections(analyses)
    assert [section.key for section in sections] == ["confusion", "locality", "masking", "maps"]
    for section in sections:
        texts = [block.text for block in section.blocks if isinstance(block, Text)]
        assert section.data["verdict"] in texts
        assert any(text.startswith("What to look for") for text in texts)
        assert any(isinstance(block, Picture) for block in section.blocks)
        names = {row[0] for block in section.blocks if isinstance(block, Table) for row in block.rows}
        assert {one.label for one in analyses} <= names
    # As JSON, too, which has no NaN.
    json.dumps([section.data for section in sections], allow_nan=False)


def test_data_are_the_dataclasses():
    confusion, locality, masking, maps = (section.data["models"]["inline"] for section in analysis_sections(THREE))
    assert (confusion["epsilon"], confusion["delta"]) == (0.01, 0.1)
    assert confusion["layers"][1] == {"layer": "blocks.1", "pairs": [1000, 1000], "confused": [0, 0]}
    assert locality[0]["total"] == 0.5
    assert locality[0]["size"] == [7, 7]
    assert masking["masked"][1] == {"side": 3, "hidden": "random", "top1": 70.0, "loss": None}
    assert np.shape(maps[1]["maps"][0]["weights"]) == (7, 7)
    assert maps[0]["maps"][0]["weights"][6][6] is None
    assert maps[0]["maps"][0]["total"][0][0] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("linear", "inline", "outcome"),
    [(300, 2, "As theory predicts"), (0, 0, "not visible"), (2, 300, "not visible")],
)
def test_verdict_on_confusion(linear, inline, outcome):
    text = confusion_verdict(
        [analysis("softmax"), analysis("linear", confused=linear), analysis("inline", confused=inline)]
    )
    assert outcome in text
    assert f"linear {short_percent(linear / 1000)} %" in text


def test_verdict_on_confusion_of_one_model_is_a_number():
    text = confusion_verdict([analysis("linear", confused=300)])
    assert text == "Of all pairs of different queries, these percentages have the same row: linear 30.0 %."


def test_verdict_on_locality():
    text = locality_verdict(THREE)
    assert "softmax 1.33, linear 1.07 and inline 3.33 (1.33 without its convolution)" in text
    assert "as in the paper" in text
    assert "makes it more local" in text
    text = locality_verdict([analysis("softmax", near=0.1), analysis("linear"), analysis("inline", added=-0.1)])
    assert "here it is not" in text
    assert "here it does not" in text


@pytest.mark.parametrize(
    ("losses", "images", "sentence"),
    [
        ((20.0, 10.0), 4000, "loses 20.0 points without the 3×3 neighbourhood and loses 10.0 points without as many"),
        ((20.0, 10.0), 4000, "the neighbourhood matters more"),
        ((10.0, 20.0), 4000, "the neighbourhood matters less"),
        ((20.0, 10.0), 40, "a difference within chance"),
        ((20.0, -1.5), 40, "gains 1.5 points"),
    ],
)
def test_verdict_on_masking(losses, images, sentence):
    assert sentence in masking_verdict([analysis("softmax", losses=losses, images=images)])


def test_share_of_negative_weights():
    assert negative_fraction(all_weights(analysis("softmax"))) == 0
    # 47 places of 0.02, one of -0.1, and one that is not seen.
    assert negative_fraction(all_weights(analysis("inline", negative=0.1))) == pytest.approx(
        0.1 / (0.1 + 47 * 0.02), rel=1e-4
    )


def test_what_could_not_be_measured_is_reported():
    reduced = analysis("softmax", label="pvt")
    reduced.locality, reduced.masking, reduced.no_masking = [], None, "its keys have no places"
    for view in reduced.views:
        view.maps = []
    for analyses in ([reduced], [reduced, THREE[0]]):
        _, locality, masking, maps = analysis_sections(analyses)
        assert any("Layers of pvt" in block.text for block in locality.blocks if isinstance(block, Text))
        assert any(
            block.text == "pvt is left out: its keys have no places."
            for block in masking.blocks[-4:]
            if isinstance(block, Text)
        )
        assert list(masking.data["models"]) == list(maps.data["models"]) == [one.label for one in analyses[1:]]


def test_models_of_different_depth_share_a_table():
    deep = analysis("softmax")
    deep.confusion.layers.append(LayerConfusion("blocks.2", [1000, 1000], [5, 5]))
    tables = [block for block in analysis_sections([deep, THREE[1]])[0].blocks if isinstance(block, Table)]
    assert tables[1].rows == [("1", "0", "30.0"), ("2", "0", "30.0"), ("3", "0.5", "–")]


def test_small_shares_are_not_rounded_to_nothing():
    assert [short_percent(share) for share in (0, 0.25, 0.0012, 0.00001234)] == ["0", "25.0", "0.1", "0.001"]
    assert to_json({"a": (1, math.inf, 0.1 + 0.2)}) == {"a": [1, None, 0.3]}
