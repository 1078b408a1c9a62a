"""Rows of one query: equal to the explicit N×N form, and computed without it."""

import time

import pytest
import timm
import torch

import inlinevit  # noqa: F401
from inlinevit import ops
from inlinevit.analysis.confusion import distances
from inlinevit.analysis.locality import layer_locality as exact_locality
from inlinevit.explore.capture import Capture, capture, layer_locality, masked_logits, masked_sides
from inlinevit.explore.rows import KINDS, confused_queries, locate, query_row


def captured(name: str, size: int = 96, **options: object) -> Capture:
    torch.manual_seed(0)
    model = timm.create_model(name, **options).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "qkv.weight" in key:
                parameter.copy_(0.3 * torch.randn_like(parameter))
        return capture(model, torch.randn(3, size, size))


DEIT = dict(img_size=96, embed_dim=32, depth=2, num_heads=2)


@pytest.fixture(scope="module")
def deit() -> Capture:
    return captured("inline_deit_tiny", **DEIT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("query", [(0, 0), (2, 3), (5, 5)])
def test_rows_are_those_of_the_explicit_form(deit, kind, query):
    layer = deit.layers[1]
    feature_map = "relu" if kind == "linear" else "identity"
    weights = ops.attention_weights(layer.q, layer.k, kind=kind, feature_map=feature_map)[0]
    token = 1 + query[0] * 6 + query[1]
    row = query_row(layer, query, kind)
    torch.testing.assert_close(row.weights.flatten(1), weights[:, token, 1:])
    torch.testing.assert_close(row.prefix, weights[:, token, :1])
    assert row.is_own == (kind == "inline")
    assert row.uniform == pytest.approx(1 / 37)
    total = row.weights.flatten(1).sum(dim=1) + row.prefix.sum(dim=1)
    torch.testing.assert_close(total, torch.ones(2))


def test_the_local_residual_is_that_of_the_layer(deit):
    layer = deit.layers[0]
    for query in [(0, 0), (0, 3), (3, 2), (5, 5)]:
        row = query_row(layer, query, "inline")
        token = 1 + query[0] * 6 + query[1]
        total = layer.total_weights(token, token + 1)[0, :, 0, 1:]
        added = row.weights.flatten(1).clone()
        added[:, row.local.places] += row.local.weights
        torch.testing.assert_close(added, total)
    assert query_row(layer, (2, 2), "softmax").local is None


@pytest.mark.parametrize("kind", KINDS)
def test_confused_queries_are_those_of_the_definition(kind):
    found = captured("inline_deit_tiny", attention=kind, **DEIT)
    layer = found.layers[0]
    with torch.no_grad():
        # Queries of one direction and several lengths: linear attention confuses them, the others do not.
        layer.q[0, :, 5:12] = layer.q[0, :, 4:5] * torch.linspace(0.3, 2, 7)[:, None]
        # Equal rows of all kinds, of queries that hardly differ: not confused.
        layer.q[0, :, 20] = 1.001 * layer.q[0, :, 4]
    layer.weights_function = lambda first, last, mask: ops.attention_weights(
        layer.q[:, :, first:last], layer.k, kind=kind, attn_mask=mask
    )
    rows, counts = layer.attention_weights()[0], []
    for token in (4, 9, 20, 30):
        place = divmod(token - 1, 6)
        same = distances(rows[:, token : token + 1], rows)[:, 0] <= 0.01
        differ = distances(layer.q[0, :, token : token + 1], layer.q[0])[:, 0] > 0.1
        wanted = [[int(place) - 1 for place in torch.nonzero(both) if place > 0] for both in same & differ]
        assert query_row(layer, place, kind).confused == wanted
        counts += map(len, wanted)
    assert (max(counts) > 0) == (kind == "linear")


def test_equal_rows_of_softmax_are_found():
    """Keys in a plane: queries that differ across it have equal rows."""
    found = captured("softmax_deit_tiny", **DEIT)
    layer = found.layers[0]
    layer.k[..., 0] = 0
    layer.q[0, :, 7] = layer.q[0, :, 4]
    layer.q[0, :, 7, 0] += 5 + layer.q[0, :, 4].norm(dim=-1)
    assert all(6 in places for places in query_row(layer, (0, 3), "softmax").confused)


def test_other_attentions_are_compared_by_their_rows():
    layer = captured("focused_deit_tiny", **{**DEIT, "class_token": False, "global_pool": "avg"}).layers[0]
    row = query_row(layer, (1, 1), "focused")
    assert row.is_own
    assert row.confused is not None
    torch.testing.assert_close(row.weights.flatten(1), layer.attention_weights(7, 8)[0, :, 0])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("inline_swin_tiny", dict(img_size=64, window_size=4, depths=(2, 1, 1, 1))),
        ("inline_cswin_tiny", dict(img_size=64, depths=(1, 1, 1, 1))),
        ("vit_tiny_patch16_224", dict(img_size=64, depth=1)),
        ("deit_tiny_patch16_224", dict(img_size=64, depth=1)),
        ("swin_tiny_patch4_window7_224", dict(img_size=112, depths=(2, 1, 1, 1))),
    ],
    ids=str,
)
def test_windows_and_models_of_timm(name, options):
    found = captured(name, options["img_size"], **options)
    for layer in found.layers:
        height, width = layer.size
        for query in [(0, 0), (height - 1, width // 2)]:
            window, token = locate(layer, query)
            row = query_row(layer, query, layer.attention)
            own = layer.attention_weights(token, token + 1)[window, :, 0]
            sums = row.weights.flatten(1).nansum(dim=1) + row.prefix.sum(dim=1)
            torch.testing.assert_close(sums, own[:, layer.is_real[window]].sum(dim=1))
            assert row.weights.isnan().any() == (layer.windows > 1)
            for kind in KINDS:
                assert query_row(layer, query, kind).weights.shape == (layer.q.shape[1], height, width)


def test_reduced_maps_are_left_out():
    found = captured(
        "inline_pvt_tiny",
        64,
        img_size=64,
        depths=(1, 1, 1, 1),
        attention=("softmax", "inline", "inline", "softmax"),
        sr_ratios=(2, 1, 1, 1),
    )
    assert found.reduced == 1
    assert masked_sides(found) == []


def test_no_matrix_of_all_pairs_at_64_by_64(monkeypatch):
    """4096 tokens: a matrix of all pairs would have 16 million elements a head."""
    found = captured("inline_deit_tiny", 512, img_size=512, patch_size=8, embed_dim=64, depth=1, num_heads=2)
    layer = found.layers[0]
    assert layer.size == (64, 64)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        for kind in KINDS:
            query_row(layer, (31, 17), kind)
    # Queries of all heads, and the rows of at most MOST_CANDIDATES candidates.
    assert largest <= 128 * 4097
    started = time.perf_counter()
    for kind in KINDS:
        query_row(layer, (20, 20), kind)
    assert time.perf_counter() - started < 1.0


def test_locality_is_that_of_the_analysis_when_all_queries_are_taken(deit):
    for layer in deit.layers:
        exact, found = exact_locality(layer), layer_locality(layer, queries=36)
        assert found.uniform == pytest.approx(exact.uniform)
        assert found.weights["inline"] == pytest.approx(exact.attention, rel=1e-4)
        assert found.total == pytest.approx(exact.total, rel=1e-4)
    assert set(deit.locality(0).weights) == set(KINDS)


def test_masking_changes_logits():
    torch.manual_seed(0)
    model = timm.create_model("inline_deit_tiny", **DEIT).eval()
    image = torch.randn(3, 96, 96)
    found = masked_logits(model, image, 3)
    plain = model(image[None])[0]
    assert set(found) == {"near", "random"}
    assert not any(torch.allclose(logits, plain, atol=1e-5) for logits in found.values())


def test_too_many_tokens_are_refused(monkeypatch):
    monkeypatch.setattr("inlinevit.explore.capture.MOST_TOKENS", 30)
    with pytest.raises(ValueError, match="6 × 6 tokens, too many to explore: choose a smaller --img_size"):
        captured("inline_deit_tiny", **DEIT)
    monkeypatch.undo()
    monkeypatch.setattr("inlinevit.explore.capture.MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="choose a smaller --img_size"):
        captured("inline_deit_tiny", **DEIT)


def test_confused_queries_of_large_windows_without_a_form_are_unknown(monkeypatch):
    layer = captured("focused_deit_tiny", **{**DEIT, "class_token": False, "global_pool": "avg"}).layers[0]
    monkeypatch.setattr("inlinevit.explore.rows.MOST_EXPLICIT_TOKENS", 20)
    assert confused_queries(layer, 0, 3, "focused", layer.attention_weights(3, 4)[0, :, 0]) is None
