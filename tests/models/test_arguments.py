"""Arguments of models that make no sense are refused by name, before anything is made."""

import inspect
from typing import Any

import pytest
import timm

from inlinevit.models import InLineViT
from inlinevit.models._arguments import RANGES, UNCHECKED
from inlinevit.models.inline_cswin import InLineCSWin
from inlinevit.models.inline_deit import InLineDeiT
from inlinevit.models.inline_pvt import InLinePVT
from inlinevit.models.inline_swin import InLineSwin

NAN, INFINITE = float("nan"), float("inf")
FAMILIES = (InLineDeiT, InLinePVT, InLineSwin, InLineCSWin)
SENSELESS = [-1, NAN, INFINITE, 10**9, 10**18, "abc", [0], [[1]], (0, 0), (1, 2, 3), {"a": 1}, 1.5, -0.5, 1e300]
# Values of the list above that an argument takes all the same.
ACCEPTED = [("mlp_ratio", 1.5)]


def hints(family: type) -> dict[str, Any]:
    """The types of the keyword arguments of a family and of all families."""
    annotated = {
        **inspect.signature(InLineViT).parameters,
        **inspect.signature(family).parameters,
    }
    return {
        name: parameter.annotation
        for name, parameter in annotated.items()
        if parameter.kind == inspect.Parameter.KEYWORD_ONLY and name not in UNCHECKED
    }


@pytest.mark.parametrize(
    ("family", "name"),
    [(family, name) for family in FAMILIES for name in hints(family)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_senseless_values_are_refused_by_name(family: type, name: str) -> None:
    for value in SENSELESS:
        if (name, value) not in ACCEPTED:
            with pytest.raises(ValueError, match=rf"\b{name}\b|\battention\b|\bstages?\b") as refusal:
                family(**{name: value}, device="meta")
            assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_have_ranges(family: type) -> None:
    """A new argument that is a number gets a range."""
    numbers = {name for name, hint in hints(family).items() if any(kind in str(hint) for kind in ("int", "float"))}
    assert numbers <= set(RANGES)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"patch_size": 0}, "patch_size is 0: it should be at least 1"),
        ({"embed_dim": 0}, "embed_dim is 0: it should be at least 1"),
        ({"in_chans": 0}, "in_chans is 0: it should be at least 1"),
        ({"img_size": 0}, "img_size is 0: it should be at least 1"),
        ({"img_size": (224, 0)}, r"img_size is \(224, 0\): it should be at least 1"),
        ({"img_size": 1_000_000}, "img_size is 1000000: it should be at most 65536"),
        ({"num_classes": True}, "num_classes is True: it should be a whole number"),
        ({"attention": 3}, "attention is 3: it should be text or a list"),
        ({"attention": []}, "takes 1 to 12 attention names, not 0"),
        ({"attn_kwargs": 3}, "attn_kwargs is 3"),
        ({"attn_kwargs": {"feature_map": 3}}, "feature_map in attn_kwargs is 3: it should be text"),
        ({"attn_kwargs": {"feature_map": "elu"}}, "unknown feature map 'elu'"),
        ({"attn_kwargs": {"local_residual": "no"}}, "local_residual in attn_kwargs is no"),
        ({"attn_kwargs": {"path": "shortest"}}, "unknown path 'shortest': choose one of"),
        ({"qkv_bias": "yes"}, "qkv_bias is yes: it should be true or false"),
        ({"mlp_ratio": 0.001}, "mlp_ratio is 0.001, which leaves no hidden channels"),
        ({"drop_path_rate": 1.0}, "drop_path_rate is 1.0: it should be from 0 to below 1"),
        ({"drop_rate": NAN}, "drop_rate is nan: it should be finite"),
        ({"global_pool": 3}, "global_pool is 3: it should be text"),
    ],
)
def test_what_is_said(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        timm.create_model("inline_deit_tiny", device="meta", **options)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("inline_pvt_tiny", {"depths": []}, r"depths is \[\]: it should have an entry for each stage"),
        ("inline_swin_tiny", {"depths": [1] * 14, "num_heads": [1] * 14, "attention": "inline"}, "stage 10 would have"),
        (
            "pvt_tiny",
            {"depths": [1] * 5, "embed_dims": [8] * 5, "num_heads": [1] * 5, "mlp_ratios": [1] * 5},
            "sr_ratios have no default for 5 stages: pass one entry per stage",
        ),
        (
            "cswin_tiny",
            {"depths": [1] * 5, "num_heads": [2] * 5},
            "split_sizes have no default for 5 stages: pass one entry per stage",
        ),
        ("inline_swin_tiny", {"softmax_window_size": 0}, "softmax_window_size is 0: it should be at least 1"),
        ("cswin_tiny", {"split_sizes": [1, 2, 0, 7]}, r"split_sizes is \[1, 2, 0, 7\]: it should be at least 1"),
    ],
)
def test_stages_that_make_no_sense(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        timm.create_model(name, device="meta", **options)


def test_edges_are_good() -> None:
    """YAML has lists for tuples; images may be large; a head is not needed."""
    model = timm.create_model("inline_deit_tiny", img_size=[16384, 4096], num_classes=0, depth=1, device="meta")
    assert model.stages[0].resample_pos_embed.grid == (1024, 256)
    model.reset_classifier(2)
    with pytest.raises(ValueError, match="num_classes is -3: it should be at least 0"):
        model.reset_classifier(-3)
    with pytest.raises(ValueError, match="img_size is 0: it should be at least 1"):
        model.set_input_size(0)
