"""torch.export of all families: nothing in the graph depends on the shape of the example."""

from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from inlinevit.export.program import AdaptivePoolByProducts, export_program, exportable
from inlinevit.layers.embed import resample_by_products, resample_pos_embed

# Few and narrow stages of each family, in all tests; the softmax windows of Swin and stripes of CSWin, which cover the
# map at some sizes only, are in the second stage.
NARROW: dict[str, dict[str, Any]] = {
    "inline_deit_tiny": {"depth": 1, "embed_dim": 16, "num_heads": 2},
    "inline_pvt_tiny": {"depths": (1, 1), "embed_dims": (16, 16), "num_heads": (2, 2), "mlp_ratios": (1.0, 1.0)},
    "inline_swin_tiny": {
        "depths": (1, 2),
        "embed_dim": 16,
        "num_heads": (2, 2),
        "attention": ("inline", "softmax"),
    },
    "inline_cswin_tiny": {
        "depths": (1, 1, 1),
        "embed_dim": 16,
        "num_heads": (2, 2, 2),
        "split_sizes": (1, 7, 7),
        "attention": ("inline", "softmax", "softmax"),
    },
}
# One block per stage, two where every second is shifted; the last windows of Swin cover its map at some sizes only.
SMALL: dict[str, dict[str, Any]] = {
    "inline_deit_tiny": {"depth": 1},
    "inline_pvt_tiny": {"depths": (1, 1, 1, 1)},
    "inline_swin_tiny": {"depths": (1, 1, 1, 2)},
    "inline_cswin_tiny": {"depths": (1, 1, 1, 1)},
    "pvt_tiny": {"depths": (1, 1, 1, 1)},
    "cswin_tiny": {"depths": (1, 1, 1, 1)},
    **{
        f"{name}_deit_tiny": {"depth": 1}
        for name in (
            "softmax",
            "linear",
            "hydra",
            "efficient",
            "angular",
            "enhanced",
            "focused",
            "mala",
            "rala",
            "polaformer",
            "agent",
            "vit3",
            "mhla",
            "circulant",
        )
    },
}
# Windows, stripes and blocks: torch derives guards from the strides of the example, which refuse other sizes although
# the graph computes them.
WINDOWED = ("inline_swin_tiny", "inline_cswin_tiny", "cswin_tiny", "mhla_deit_tiny")
SHAPES = ((2, 3, 224, 224), (3, 3, 97, 250), (1, 3, 33, 40), (2, 3, 40, 33), (1, 3, 256, 480))


def check_program(name: str, options: dict[str, Any]) -> None:
    """Export a model, and compare it with the graph at sizes that the example did not have."""
    torch.manual_seed(0)
    model = timm.create_model(name, **options, num_classes=10).eval()
    program = export_program(model, 3)
    module = program.module(check_guards=name not in WINDOWED)
    for shape in SHAPES:
        if name == "mhla_deit_tiny" and min(shape[2:]) <= 64:
            # torch takes lengths of 1 for others than those of the example: those of blocks in maps of up to 4 tokens.
            continue
        images = torch.randn(*shape)
        with torch.no_grad():
            torch.testing.assert_close(module(images), model(images), rtol=1e-4, atol=1e-5)
    # Neither contexts of autocast nor other subgraphs, which exporters record again.
    assert not [node for node in program.graph.nodes if node.op == "get_attr"]


@pytest.mark.integration
@pytest.mark.parametrize("name", NARROW)
def test_programs_of_each_family_take_any_batch_height_and_width(name: str) -> None:
    check_program(name, NARROW[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_programs_take_any_batch_height_and_width(name: str) -> None:
    check_program(name, SMALL[name])


class OfOneSize(nn.Module):
    """A model that refuses other sizes, as many of timm's do, or whose result depends on the size in Python."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "assertion":
            assert x.shape[2:] == (64, 64), "Input height doesn't match model"
        return x.mean(dim=(2, 3)) * int(x.shape[2])


@pytest.mark.parametrize(
    ("how", "message"),
    [("assertion", r"\(Input height doesn't match model\): fix its input"), ("int", "for all sizes: fix its input")],
)
def test_models_for_one_size_are_refused_unless_it_is_given(how: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        export_program(OfOneSize(how), 3)
    images = torch.ones(1, 3, 64, 64)
    torch.testing.assert_close(
        export_program(OfOneSize(how), 3, [1, 3, 64, 64]).module()(images), 64 * images[..., 0, 0]
    )


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(14, 14), (5, 23), (1, 1), (20, 19), (64, 100), (7, 9)])
def test_positions_are_resized_by_products_as_by_torch(interpolation: str, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    for grid in ((14, 14), (7, 9)):
        positions = torch.randn(1, 1 + grid[0] * grid[1], 8)
        expected = resample_pos_embed(positions, grid, size, 1, interpolation)
        found = resample_by_products(positions, grid, size, 1, interpolation)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        if size == grid:
            assert torch.equal(found, positions)


@pytest.mark.parametrize("size", [(1, 1), (5, 7), (6, 6), (13, 40)])
def test_adaptive_pooling_by_products_equals_that_of_torch(size: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *size)
    for count in (2, 3, 6):
        found = AdaptivePoolByProducts((count, count))(x)
        torch.testing.assert_close(found, F.adaptive_avg_pool2d(x, count), rtol=1e-5, atol=1e-6)


def test_only_pooling_to_several_bins_is_replaced() -> None:
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d(3))
    replaced = exportable(model)
    assert [type(module) for module in replaced.children()] == [nn.AdaptiveAvgPool2d, AdaptivePoolByProducts]
    assert type(model[1]) is nn.AdaptiveAvgPool2d
