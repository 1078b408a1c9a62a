"""Confusion, on queries whose answer is known."""

import pytest
import timm
import torch

from inlinevit.analysis import layer as layer_module
from inlinevit.analysis import measure_confusion
from inlinevit.analysis.confusion import count_confused_pairs, distances

KINDS = ("softmax", "linear", "inline")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def counts(layer, **options) -> tuple[int, int]:
    pairs, confused = count_confused_pairs(layer, **options)
    return int(pairs.sum()), int(confused.sum())


@pytest.mark.parametrize("kind", KINDS)
def test_identical_queries_are_no_pair(make_layer, kind):
    """They get one row, as they should."""
    q = draw(1, 2, 1, 4).expand(-1, -1, 9, -1)
    assert counts(make_layer(q, draw(1, 2, 9, 4), kind=kind)) == (0, 0)


@pytest.mark.parametrize(("kind", "expected"), [("softmax", 0), ("linear", 2 * 36), ("inline", 0)])
def test_collinear_queries(make_layer, kind, expected):
    """The claim of the paper: of one direction and nine lengths, linear attention makes one query."""
    direction = draw(1, 2, 1, 4).abs()
    q = direction * torch.linspace(1, 3, 9, dtype=torch.float64)[:, None]
    layer = make_layer(q, draw(1, 2, 9, 4), kind=kind)
    pairs, confused = counts(layer, delta=0.05)
    assert pairs == 2 * 36
    assert confused == expected


def test_negative_queries_vanish_under_relu(make_layer):
    """φ(q) = 0 for all of them: their rows are zeros, whatever they are."""
    q, k = -draw(1, 1, 5, 4).abs(), draw(1, 1, 5, 4)
    assert counts(make_layer(q, k, kind="linear")) == (10, 10)
    assert counts(make_layer(q, k, kind="inline"))[1] == 0
    assert counts(make_layer(q, k, kind="inline", feature_map="relu")) == (10, 10)


def test_thresholds_are_relative_to_the_longer(make_layer):
    q = torch.tensor([[1.0, 0.0], [1.09, 0.0], [2.0, 0.0]], dtype=torch.float64)[None, None]
    layer = make_layer(q, draw(1, 1, 3, 2), kind="linear")
    # 0.09 / 1.09 = 0.083, 1 / 2 = 0.5, 0.91 / 2 = 0.455
    assert counts(layer, delta=0.08) == (3, 3)
    assert counts(layer, delta=0.09) == (2, 2)
    assert counts(layer, delta=0.46) == (1, 1)
    softmax = make_layer(q, draw(1, 1, 3, 2), kind="softmax")
    rows = softmax.attention_weights()[0, 0]
    nearest = float((rows[0] - rows[1]).norm() / max(rows[0].norm(), rows[1].norm()))
    assert counts(softmax, delta=0.08, epsilon=0.99 * nearest) == (3, 0)
    assert counts(softmax, delta=0.08, epsilon=1.01 * nearest) == (3, 1)


def test_padding_is_no_query_and_images_are_kept_apart(make_layer):
    direction = torch.ones(1, 1, 1, 4, dtype=torch.float64)
    lengths = torch.tensor([[1.0, 2, 3, 4], [1.0, 1, 1, 5]], dtype=torch.float64)[:, None, :, None]
    q, k = direction * lengths, draw(2, 1, 4, 4).abs()
    layer = make_layer(q, k, kind="linear", size=(2, 2), places=torch.tensor([[0, 1, 2, -2]]))
    pairs, confused = count_confused_pairs(layer)
    assert pairs.tolist() == confused.tolist() == [3, 0]


def test_pieces_change_nothing(make_layer, monkeypatch):
    q = torch.cat([draw(2, 2, 11, 4), draw(2, 2, 1, 4).abs() * torch.arange(1, 13)[:, None]], dim=2)
    layer = make_layer(q, draw(2, 2, 23, 4), kind="linear")
    whole = count_confused_pairs(layer, delta=0.05)
    monkeypatch.setattr(layer_module, "CHUNK", 4 * 23 * 5)
    assert len(list(layer.chunks())) == 5
    torch.testing.assert_close(count_confused_pairs(layer, delta=0.05), whole, rtol=0, atol=0)
    # Of those that were drawn at random some are collinear under ReLU, too.
    assert all(2 * 66 <= confused < 2 * 253 for confused in whole[1].tolist())


def test_distances_keep_their_digits_far_from_zero():
    x = draw(7, 5) * 1e-7 + 3
    torch.testing.assert_close(distances(x, x) * x.norm(dim=-1).amax(), torch.cdist(x, x), rtol=1e-4, atol=1e-12)


def test_a_model_is_gone_through_layer_by_layer():
    model = timm.create_model("linear_deit_tiny", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2).eval()
    found = measure_confusion(model, [torch.randn(2, 3, 32, 32), torch.randn(1, 3, 32, 32)], epsilon=2.0)
    assert [layer.layer for layer in found.layers] == [f"stages.0.blocks.{i}.attn" for i in range(2)]
    # Rows are never farther apart than twice the longer: all pairs are confused.
    assert all(layer.confused == layer.pairs and layer.fraction == 1 for layer in found.layers)
    assert len(found.per_image) == 3
    assert found.per_image[0] == sum(layer.pairs[0] for layer in found.layers) <= 2 * 2 * 17 * 16 // 2
