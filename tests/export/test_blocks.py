"""Models by blocks: each kind is recorded once, and blocks keep their own weights."""

from typing import Any

import pytest
import timm
import torch
from torch import nn

from inlinevit.export import blocks as blocks_module
from inlinevit.export.blocks import Placeholder, is_same, take_blocks, to_onnx_by_blocks
from inlinevit.export.int8 import onnx_layers
from inlinevit.export.program import exportable

SWIN = {
    "depths": (2, 3),
    "embed_dim": 16,
    "num_heads": (2, 2),
    "attention": ("inline", "softmax"),
    "drop_path_rate": 0.3,
    "num_classes": 10,
}
CSWIN = {**SWIN, "depths": (1, 2), "split_sizes": (1, 3)}
SHAPES = ((2, 224, 224), (3, 97, 250), (1, 33, 40), (2, 40, 33))


def blocks_of(name: str, **options: Any) -> list[nn.Module]:
    return list(take_blocks(exportable(timm.create_model(name, **options))).values())


def test_blocks_are_the_same_but_for_their_weights() -> None:
    found = blocks_of("inline_swin_tiny", **SWIN)
    groups = [[place for place, other in enumerate(found) if is_same(one, other)] for one in found]
    # Softmax windows are shifted in every second block.
    assert [list(group) for group in dict.fromkeys(map(tuple, groups))] == [[0, 1], [2, 4], [3]]


@pytest.mark.parametrize(
    "options",
    [
        {"attn_kwargs": {"local_residual": False}},
        {"attn_kwargs": {"feature_map": "relu"}},
        {"mlp_ratio": 2.0},
        {"qkv_bias": False},
        {"num_heads": (4, 2)},
        {"window_size": 7},
        {"attention": ("linear", "softmax")},
    ],
)
def test_blocks_with_other_settings_differ(options: dict[str, Any]) -> None:
    assert not is_same(blocks_of("inline_swin_tiny", **SWIN)[0], blocks_of("inline_swin_tiny", **SWIN | options)[0])


def test_an_attribute_that_is_a_tensor_counts_as_a_difference() -> None:
    first, second, *_ = blocks_of("inline_swin_tiny", **SWIN)
    first.attn.strength, second.attn.strength = torch.ones(2), torch.ones(2)
    assert not is_same(first, second)


def test_blocks_become_placeholders_in_a_copy() -> None:
    model = timm.create_model("inline_swin_tiny", **SWIN)
    copy = exportable(model)
    assert list(take_blocks(copy)) == [f"stages.{stage}.blocks.{i}" for stage in (0, 1) for i in range(2 + stage)]
    assert [type(block) for block in copy.stages[1].blocks] == [Placeholder] * 3
    assert [block.index for block in copy.stages[1].blocks] == [2, 3, 4]
    assert not [module for module in model.modules() if isinstance(module, Placeholder)]


def test_blocks_with_prefix_tokens_or_hooks_stay() -> None:
    assert not take_blocks(timm.create_model("inline_deit_tiny", depth=2, embed_dim=16, num_heads=2))
    model = timm.create_model("inline_swin_tiny", **SWIN)
    model.stages[0].blocks[1].attn.register_forward_hook(lambda *_: None)
    assert "stages.0.blocks.1" not in take_blocks(model)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "kinds"), [("inline_swin_tiny", SWIN, 3), ("inline_cswin_tiny", CSWIN, 2)])
def test_files_by_blocks_agree_with_the_model(
    name: str, options: dict[str, Any], kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, record = [], blocks_module._record
    monkeypatch.setattr(blocks_module, "_record", lambda block: recorded.append(block) or record(block))
    torch.manual_seed(0)
    model = timm.create_model(name, **options).eval()
    # Biases and norms of new models are the same in all blocks.
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    file = to_onnx_by_blocks(model, 3, ["logits"])
    assert file is not None
    assert len(recorded) == kinds
    assert {entry.domain for entry in file.opset_import} <= {"", "ai.onnx"}
    assert not file.functions
    # No paths of source files.
    assert ".py" not in str([entry.value for node in file.graph.node for entry in node.metadata_props])
    # One for each side of the image and of the maps at most: blocks of a stage share what depends on the size.
    assert sum(node.op_type == "Shape" for node in file.graph.node) <= 3 * (1 + len(options["depths"]))
    # Weights are constants of their layers: two embeddings, four layers in each block, and the head.
    if name == "inline_swin_tiny":
        assert len(onnx_layers(file.graph)) == 2 + 4 * sum(options["depths"]) + 1
    check_file(file, model)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["linear", "hydra", "efficient", "angular", "enhanced", "focused"])
def test_all_attentions_by_blocks(attention: str) -> None:
    """Some learn positions for a grid, or have convolutions of their own."""
    torch.manual_seed(0)
    options = {"depths": (2,), "embed_dims": (16,), "num_heads": (2,), "mlp_ratios": (1.0,), "num_classes": 5}
    model = timm.create_model("inline_pvt_tiny", attention=attention, in_chans=1, **options).eval()
    file = to_onnx_by_blocks(model, 1, ["logits"])
    assert file is not None
    check_file(file, model)


def check_file(file: Any, model: nn.Module) -> None:
    """Compare a file with its model at several sizes."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file.SerializeToString(), providers=["CPUExecutionProvider"])
    for batch, *size in SHAPES:
        images = torch.randn(batch, model.in_chans, *size)
        (found,) = session.run(None, {"images": images.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(found), model(images), rtol=1e-4, atol=1e-4)
