"""Hidden tokens are as if they were not there."""

from functools import partial

import pytest
import timm
import torch

from inlinevit.analysis import Layer, measure_masking, run_masked, watch
from inlinevit.analysis.masking import hide_at_random, hide_near
from inlinevit.layers import ATTENTIONS


def small(word: str, **options):
    torch.manual_seed(0)
    settings = {"img_size": 32, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 5}
    model = timm.create_model("inline_deit_tiny", attention=word, **settings, **options).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


def layer_of(model) -> Layer:
    found = []
    watch(model, torch.randn(2, 3, 32, 32, dtype=torch.float64), found.append)
    return found[0]


# What angular and the convolutions need is in tests/ops and tests/layers; here are those that are sums over the keys.
@pytest.mark.parametrize("word", ["softmax", "linear", "inline", "efficient", "hydra", "focused"])
@pytest.mark.parametrize("how", ["near", "random"])
def test_masked_attention_is_attention_without_those_tokens(word, how):
    """Query by query: the layer's own fast `attend`, of the keys and values that are left."""
    model = small(word)
    layer, mixer = layer_of(model), model.stages[0].blocks[0].attn
    see = partial(hide_near, side=5)
    if how == "random":
        see = partial(hide_at_random, side=5, generator=torch.Generator().manual_seed(1))
    seen = see(layer, 0, layer.tokens)
    rows = layer.attention_weights(attn_mask=seen.unsqueeze(1))
    windows = mixer.layout((8, 8))[0]
    keys = mixer.add_pos_embed(layer.k, windows) if word == "focused" else layer.k
    for query in (0, 1, 9, 30, 64):
        left = seen[0, query]
        q, k, v = layer.q[:, :, query : query + 1], keys[:, :, left], layer.v[:, :, left]
        if word == "focused":
            from inlinevit.ops import focused_attention

            expected = focused_attention(q, k, v, mixer.positive_spread(windows))
        else:
            expected = mixer.attend(q, k, v, windows)
        torch.testing.assert_close(rows[:, :, query : query + 1] @ layer.v, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("word", [word for word, kind in ATTENTIONS.items() if kind.supports_prefix_tokens])
def test_hidden_tokens_cannot_be_heard(word):
    """Whatever stands in tokens that a query may not see, its output stays the same: also through convolutions."""
    model = small(word)
    if word == "enhanced":
        # Its MLPs see neighbours, too; here it is about attention.
        model.stages[0].blocks[0].mlp.conv.weight.data.zero_()
    layer = layer_of(model)
    see = partial(hide_near, side=3)
    query = 1 + 3 * 8 + 3
    hidden = ~see(layer, query, query + 1)[0, 0]
    assert int(hidden.sum()) == 9
    before = layer.output(see)[:, :, query]
    layer.v[:, :, hidden] += 10
    torch.testing.assert_close(layer.output(see)[:, :, query], before, rtol=1e-9, atol=1e-9)
    assert (layer.output()[:, :, query] - before).abs().max() > 1e-3


@pytest.mark.parametrize("prefix", [True, False])
def test_as_many_are_hidden_at_random(prefix):
    model = small("inline") if prefix else small("inline", class_token=False, global_pool="avg")
    layer = layer_of(model)
    for side in (3, 5, 7):
        near = ~hide_near(layer, 0, layer.tokens, side)
        random = ~hide_at_random(layer, 0, layer.tokens, side, torch.Generator().manual_seed(0))
        assert torch.equal(near.sum(dim=-1), random.sum(dim=-1))
        assert not torch.equal(near, random)
        if prefix:
            # The class token sees all, and all see it.
            for hidden in (near, random):
                assert not hidden[:, 0].any()
                assert not hidden[:, :, 0].any()
    assert near.sum(dim=-1).max() == 49
    assert near[:, -1].sum() == 16


def test_in_windows_neighbours_within_them_are_hidden():
    model = small("inline", class_token=False, global_pool="avg", window_size=3)
    layer = layer_of(model)
    assert layer.windows == 9
    random = ~hide_at_random(layer, 0, 9, 3, torch.Generator().manual_seed(0))
    near = ~hide_near(layer, 0, 9, 3)
    assert torch.equal(near.sum(dim=-1), random.sum(dim=-1))
    assert not near[:, layer.places[-1] < 0][-1].any()
    # The middle of a window of 3 × 3 sees nothing that is left, and still has an answer.
    assert near[0, 4].all()
    assert (
        run_masked(model, torch.randn(1, 3, 32, 32, dtype=torch.float64), partial(hide_near, side=3)).isfinite().all()
    )


def test_accuracy_is_that_of_the_answers():
    model = small("softmax")
    images, labels = torch.randn(6, 3, 32, 32, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 4, 0])
    found = measure_masking(model, [(images[:4], labels[:4]), (images[4:], labels[4:])], sides=(3, 7))
    assert [(score.side, score.hidden) for score in found.masked] == [
        (3, "near"),
        (3, "random"),
        (7, "near"),
        (7, "random"),
    ]
    with torch.no_grad():
        answers = model(images)
    assert found.images == 6
    assert found.top1 == pytest.approx(100 * float((answers.argmax(dim=1) == labels).double().mean()))
    hidden = run_masked(model, images, partial(hide_near, side=7))
    assert found.masked[2].loss == pytest.approx(float(torch.nn.functional.cross_entropy(hidden, labels)), rel=1e-6)
    assert found.masked[2].top1 == pytest.approx(100 * float((hidden.argmax(dim=1) == labels).double().mean()))
    again = measure_masking(model, [(images[:4], labels[:4]), (images[4:], labels[4:])], sides=(3, 7))
    assert again == found
    assert measure_masking(model, [(images, labels)], sides=(7,), seed=5).masked[1] != found.masked[3]


def test_nothing_to_measure_is_refused():
    with pytest.raises(ValueError, match="no images"):
        measure_masking(small("inline"), [])
