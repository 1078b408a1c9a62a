"""Rows as pictures."""

import pytest
import timm
import torch

from inlinevit.analysis import attention_maps, watch


def make(**options):
    torch.manual_seed(0)
    return timm.create_model("inline_deit_tiny", embed_dim=16, depth=2, num_heads=2, patch_size=8, **options).eval()


def test_a_map_is_the_row_of_its_query():
    model, image = make(), torch.randn(3, 40, 56)
    maps = attention_maps(model, image, [(0.0, 0.0), (0.5, 0.99), (1.0, 0.3)])
    layers = []
    watch(model, image[None], layers.append)
    assert [(found.layer, found.query) for found in maps] == [
        (layer.name, query) for layer in layers for query in ((0, 0), (2, 6), (4, 2))
    ]
    for found in maps:
        layer = next(layer for layer in layers if layer.name == found.layer)
        token = 1 + found.query[0] * 7 + found.query[1]
        # Without the class token.
        torch.testing.assert_close(found.weights, layer.attention_weights()[0, :, token, 1:].view(2, 5, 7))
        torch.testing.assert_close(found.total, layer.total_weights()[0, :, token, 1:].view(2, 5, 7))
        assert not torch.equal(found.weights, found.total)


def test_beyond_its_window_a_query_sees_nothing():
    model = make(class_token=False, global_pool="avg", window_size=2)
    first, shifted = attention_maps(model, torch.randn(3, 32, 32), [(0.3, 0.3)])
    assert first.query == (1, 1)
    seen = ~first.weights[0].isnan()
    assert torch.nonzero(seen).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert torch.nonzero(~shifted.weights[0].isnan()).tolist() == [[1, 1], [1, 2], [2, 1], [2, 2]]


@pytest.mark.parametrize("query", [(-0.1, 0.5), (0.5, 1.01)])
def test_a_query_outside_is_refused(query):
    with pytest.raises(ValueError, match="from 0 to 1"):
        attention_maps(make(), torch.randn(3, 32, 32), [query])
