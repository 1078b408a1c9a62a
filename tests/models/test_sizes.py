"""Models take images of any size, and windows that do not fit are padded."""

import pytest
import timm
import torch

from inlinevit.layers import ATTENTIONS
from inlinevit.models import InLineCSWin, InLineDeiT, InLinePVT, InLineSwin

SMALL = {
    "deit": lambda **options: InLineDeiT(**{"embed_dim": 32, "num_heads": 2, "depth": 2, "num_classes": 5, **options}),
    "pvt": lambda **options: InLinePVT(
        **{
            "embed_dims": (16, 32, 64, 64),
            "depths": (1, 2, 1, 1),
            "num_heads": (1, 2, 4, 4),
            "num_classes": 5,
            **options,
        }
    ),
    "swin": lambda **options: InLineSwin(
        **{"embed_dim": 16, "depths": (2, 2, 2, 2), "num_heads": (1, 2, 4, 8), "num_classes": 5, **options}
    ),
    "cswin": lambda **options: InLineCSWin(
        **{"embed_dim": 16, "depths": (1, 2, 2, 1), "num_heads": (2, 2, 4, 8), "num_classes": 5, **options}
    ),
}
PYRAMIDS = ("pvt", "swin", "cswin")
MIXED = ("inline", "linear", "softmax", "inline")


SIZES = [(32, 32), (33, 47), (32, 200), (97, 64), (224, 160), (75, 251)]
# Two of them for the baselines, which depend on the size of the map as linear attention does.
CASES = [(word, size) for word in ATTENTIONS for size in (SIZES if word == "inline" else [(75, 98)])]


def without_prefix(family: str, attention: str) -> dict[str, object]:
    """Options of models whose attention takes no class token."""
    takes_prefix = family in PYRAMIDS or ATTENTIONS[attention].supports_prefix_tokens
    return {} if takes_prefix else {"class_token": False, "global_pool": "avg"}


@pytest.mark.parametrize(("attention", "size"), CASES)
@pytest.mark.parametrize("family", SMALL)
def test_any_size_forward_and_backward(family, attention, size):
    torch.manual_seed(0)
    model = SMALL[family](attention=attention, img_size=64, **without_prefix(family, attention))
    logits = model(torch.randn(2, 3, *size))
    assert logits.shape == (2, 5)
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


WINDOWS = [
    ("inline", 1),
    ("inline", 2),
    ("inline", 7),
    ("inline", 56),
    *((word, 3) for word, kind in ATTENTIONS.items() if kind.supports_windows),
]


@pytest.mark.parametrize("family", PYRAMIDS)
@pytest.mark.parametrize(("attention", "window_size"), WINDOWS)
def test_explicit_windows_at_sizes_they_do_not_divide(family, attention, window_size):
    torch.manual_seed(0)
    model = SMALL[family](attention=attention, window_size=window_size).eval()
    images = torch.randn(2, 3, 75, 130)
    with torch.no_grad():
        together, apart = model(images), torch.cat([model(image[None]) for image in images])
    # If padding or another image leaked into a mean, a batch would differ from its images.
    torch.testing.assert_close(together, apart)
    assert together.isfinite().all()


@pytest.mark.parametrize("family", PYRAMIDS)
def test_a_window_as_large_as_the_map_is_the_whole_map(family):
    torch.manual_seed(0)
    whole, windowed = SMALL[family]().double().eval(), SMALL[family](window_size=56).double().eval()
    windowed.load_state_dict(whole.state_dict())
    images, larger = torch.randn(1, 3, 224, 224).double(), torch.randn(1, 3, 256, 224).double()
    with torch.no_grad():
        torch.testing.assert_close(windowed(images), whole(images), rtol=0, atol=1e-14)
        assert (windowed(larger) - whole(larger)).abs().max() > 1e-7


def test_windows_for_a_plain_transformer_without_class_token():
    model = SMALL["deit"](window_size=3, class_token=False, global_pool="avg", img_size=64)
    assert model(torch.randn(2, 3, 75, 130)).shape == (2, 5)
    assert model.forward_features(torch.randn(2, 3, 75, 130)).shape == (2, 32, 5, 9)


@pytest.mark.parametrize("family", SMALL)
def test_features_of_odd_sizes_are_rounded_up(family):
    model = SMALL[family](img_size=64).eval()
    images = torch.randn(1, 3, 65, 98)
    features, maps = model.forward_intermediates(images)
    reductions = [info["reduction"] for info in model.feature_info]
    assert [tuple(level.shape[2:]) for level in maps] == [(-(-65 // r), -(-98 // r)) for r in reductions]
    assert [level.shape[1] for level in maps] == [info["num_chs"] for info in model.feature_info]
    torch.testing.assert_close(features, model.forward_features(images))


@pytest.mark.parametrize("family", ["deit", "pvt"])
def test_set_input_size_keeps_the_answers_at_that_size(family):
    torch.manual_seed(0)
    model = SMALL[family](img_size=64).eval()
    images = torch.randn(1, 3, 96, 160)
    with torch.no_grad():
        resized_each_time = model(images)
        model.set_input_size((96, 160))
        torch.testing.assert_close(model(images), resized_each_time, rtol=0, atol=1e-5)
    assert model.stages[0].resample_pos_embed.grid == ((6, 10) if family == "deit" else (24, 40))


def test_rectangular_maps_with_as_many_tokens_are_told_apart():
    torch.manual_seed(0)
    model = SMALL["deit"](img_size=64).eval()
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        square, flat = model(image), model(image.reshape(1, 3, 32, 128))
    assert (square - flat).abs().max() > 1e-4


def test_softmax_windows_and_stripes_follow_the_input_size_they_are_made_for():
    assert SMALL["swin"](attention="softmax").stages[0].blocks[0].attn.relative_window == 7
    assert SMALL["swin"](attention="softmax", img_size=384).stages[0].blocks[0].attn.relative_window == 12
    assert SMALL["swin"](attention="softmax", window_size=96).stages[0].blocks[0].attn.relative_window == 12
    assert SMALL["cswin"](attention="softmax").stages[2].blocks[0].attn.layout.stripe_width == 7
    assert SMALL["cswin"](attention="softmax", img_size=384).stages[2].blocks[0].attn.layout.stripe_width == 12
    base_384 = timm.create_model("inline_swin_base_384", device="meta")
    assert base_384.stages[3].blocks[0].attn.relative_window == 12


@pytest.mark.parametrize("family", PYRAMIDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast_stay_close(family, dtype):
    torch.manual_seed(0)
    model = SMALL[family](attention=MIXED, img_size=64).eval()
    images = torch.randn(2, 3, 65, 98)
    with torch.no_grad():
        exact = model.double()(images.double())
        with torch.autocast("cpu", dtype=dtype):
            autocast = model.float()(images)
        half = model.to(dtype)(images.to(dtype))
    assert half.dtype == dtype
    for answer in (autocast, half):
        assert (answer.double() - exact).norm() < 0.05 * exact.norm()


def test_a_stage_with_a_class_token_sees_its_whole_map():
    model = timm.create_model("pvt_tiny", attention="inline", window_size=3, num_classes=5)
    for size in ((64, 64), (130, 98)):
        assert model(torch.randn(1, 3, *size)).shape == (1, 5)
