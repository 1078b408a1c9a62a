"""Figures show every model, zero, negative weights, and what is outside of windows."""

import io
import itertools

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from inlinevit.analysis.confusion import Confusion, LayerConfusion
from inlinevit.analysis.locality import LayerLocality
from inlinevit.analysis.map_plots import UNSEEN, View, break_lines, maps_figure, scale_ticks, shared_scale
from inlinevit.analysis.maps import AttentionMap
from inlinevit.analysis.masking import MaskedAccuracy, Masking
from inlinevit.analysis.plots import confusion_figure, histogram, locality_figure, log_edges, masking_figure
from inlinevit.report import STYLES, Line, Panel, Style, lines_figure, style, styles_of
from inlinevit.report.style import legend_columns

THREE = {"softmax": "softmax", "linear": "linear", "InLine": "inline"}
ONE = {"InLine": "inline"}
MANY = {**{word: word for word in STYLES}, "second": "inline", "third": "inline", "mixed": "inline+softmax"}
ALL = pytest.mark.parametrize("models", [ONE, THREE, MANY], ids=["one", "three", "many"])


def confusion(counts):
    """Two layers of 100 pairs an image, the second of which confuses nothing."""
    images = len(counts)
    layers = [LayerConfusion("a", [100] * images, counts), LayerConfusion("b", [100] * images, [0] * images)]
    return Confusion(1e-3, 0.1, layers)


def localities(attention, depth=3):
    added = 0.4 if attention == "inline" else 0.0
    return [
        LayerLocality(f"blocks.{layer}", (7, 7), 0.15, 0.2, 0.2 + added, 0.25, 0.25 + added) for layer in range(depth)
    ]


def masking():
    ways = itertools.product((3, 5), (("near", 20), ("random", 10)))
    return Masking(40, 80.0, 0.6, [MaskedAccuracy(side, hidden, 80.0 - loss, 1.0) for side, (hidden, loss) in ways])


def view(attention, depth=3, side=7):
    weights = torch.full((2, side, side), 1 / side**2)
    total = weights.clone()
    if attention == "inline":
        total[:, 2:5, 2:5] -= 0.5
    if attention == "linear":
        weights[:, 0] = total[:, 0] = torch.nan
    maps = [AttentionMap(f"blocks.{layer}", (3, 3), weights, total) for layer in range(depth)]
    return View(np.full((28, 28, 3), 0.5, np.float32), (0.5, 0.5), maps)


def figures(models):
    styles = styles_of(models)
    return {
        "confusion": confusion_figure({name: confusion([0, 3, 250]) for name in models}, styles),
        "locality": locality_figure({name: localities(word) for name, word in models.items()}, styles),
        "masking": masking_figure({name: masking() for name in models}, styles),
        "maps": maps_figure({name: view(word) for name, word in models.items()}),
    }


@ALL
def test_every_figure_can_be_written_and_names_every_model(models, tmp_path, monkeypatch):
    monkeypatch.setattr(style, "PNG_DPI", 20)
    for name, figure in figures(models).items():
        if models is THREE:
            style.save_figure(figure, tmp_path, name)
        shown = {text.get_text() for axes in figure.axes for text in (axes.title, axes._left_title, axes.yaxis.label)}
        shown |= {text.get_text() for legend in figure.legends for text in legend.get_texts()}
        shown |= {text.replace("\n", " ").split(",")[0] for text in shown}
        assert set(models) <= shown, name
    assert len(list(tmp_path.iterdir())) == (8 if models is THREE else 0)


def test_histogram_has_a_bin_for_zero_and_bins_by_powers_of_ten():
    edges = log_edges(999)
    assert edges[0] == 1
    assert edges[3] == pytest.approx(10)
    assert len(edges) == 9
    heights = histogram([0, 0, 1, 9, 10, 999], edges)
    assert heights == [2, 1, 0, 1, 1, 0, 0, 0, 0, 1]
    assert histogram([0, 0], log_edges(0))[0] == 2


def test_every_image_is_in_the_histogram():
    figure = confusion_figure({"linear": confusion([0, 0, 1, 10, 100])}, styles_of({"linear": "linear"}))
    bars = [patch.get_height() for patch in figure.axes[0].patches]
    assert sum(bars) == 5
    assert bars[0] == 2


def test_share_by_layer_is_drawn_in_percent():
    figure = confusion_figure({"linear": confusion([10, 30])}, styles_of({"linear": "linear"}))
    (line,) = figure.axes[-1].lines
    np.testing.assert_allclose(line.get_ydata(), [20, 0])


def test_shares_of_many_sizes_have_a_logarithmic_axis():
    few = Confusion(1e-3, 0.1, [LayerConfusion("a", [10**6], [1])])
    figure = confusion_figure({"a": few, "b": confusion([50])}, styles_of({"a": "inline", "b": "linear"}))
    assert figure.axes[-1].get_yscale() == "symlog"
    assert figure.axes[-1].get_ylim()[0] == 0


def test_a_convolution_has_a_line_of_its_own():
    figure = locality_figure({name: localities(word) for name, word in THREE.items()}, styles_of(THREE))
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [
        "softmax",
        "linear",
        "InLine, with its convolution",
        "InLine, attention alone",
        "uniform attention",
    ]
    by_color = [line for line in figure.axes[0].lines if line.get_color() == STYLES["inline"].color]
    assert {(line.get_linestyle(), line.get_ydata()[0]) for line in by_color} == {
        ("-", 0.6000000000000001),
        ("--", 0.2),
    }


def test_masking_begins_with_nothing_hidden():
    figure = masking_figure({"softmax": masking()}, styles_of({"softmax": "softmax"}))
    near, random = figure.axes[0].lines
    assert list(near.get_ydata()) == [80, 60, 60]
    assert list(random.get_ydata()) == [80, 70, 70]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["none", "3×3", "5×5"]


def test_maps_have_one_scale_centred_at_zero_and_grey_where_nothing_is_seen():
    figure = maps_figure({name: view(word) for name, word in THREE.items()})
    images = [axes.images[0] for axes in figure.axes if axes.images and axes.images[0].get_array().ndim == 2]
    assert len(images) == 3 * 4
    norms = {id(image.norm) for image in images}
    assert len(norms) == 1
    norm = images[0].norm
    assert norm.vmin == -norm.vmax
    assert norm(0.0) == pytest.approx(0.5)
    assert to_hex(images[3].cmap(np.ma.masked)) == UNSEEN.lower()


def test_scale_shows_weak_and_strong_weights_apart():
    norm = shared_scale([np.array([[0.01, 0.02, -0.015, 1.0]], np.float32)])
    assert norm(0.02) - norm(0.01) > 0.03
    assert norm(1.0) == pytest.approx(1)
    ticks = scale_ticks(norm)
    assert ticks == sorted(ticks)
    assert 0.0 in ticks
    assert ticks[-1] == -ticks[0] == 1.0
    assert shared_scale([np.zeros((2, 2), np.float32)]).vmax > 0


def test_long_names_are_broken_and_legends_stay_within_the_figure():
    assert break_lines("InLine, attention alone") == "InLine, attention\nalone"
    assert break_lines("swin_tiny_patch4_window7_224") == "swin_tiny_patch4_\nwindow7_224"
    assert break_lines("x" * 40) == "x" * 40
    names = ["softmax", "swin_tiny_patch4_window7_224", "linear"]
    assert legend_columns(names, 4.3) == 1
    assert legend_columns(["softmax", "linear", "InLine"], 4.3) == 3


def test_layers_that_are_shown():
    assert view("softmax", depth=1).shown == [0]
    assert view("softmax", depth=3).shown == [0, 1, 2]
    assert view("softmax", depth=12).shown == [0, 4, 7, 11]


def test_models_of_different_depth_stand_side_by_side():
    views = {"deep": view("softmax", depth=12, side=14), "flat": view("inline", depth=2)}
    figure = maps_figure(views)
    titles = [axes.get_title() for axes in figure.axes]
    assert "layer 12 of 12" in titles
    assert "layer 2 of 2" in titles
    layers = {"deep": localities("softmax", 12), "flat": localities("inline", 2)}
    figure = locality_figure(layers, styles_of({"deep": "softmax", "flat": "inline"}))
    assert {len(line.get_xdata()) for line in figure.axes[0].lines[:-1]} == {12, 2}


def test_names_are_not_formulas() -> None:
    """The folder of a run may have any name."""
    hostile = Style("$\\frac$ {", "#000000", "o", "-")
    figure = lines_figure([Panel("x", hostile.name, [Line(hostile, [1], [2])], hostile.name)])
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    assert buffer.tell() > 1000
