"""Models whose images are shared by processes, against whole ones. To be run by every process of a group."""

import copy
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from inlinevit.ops import KeyValueState
from inlinevit.parallel import (
    RowSharding,
    SequenceGroup,
    add_halo,
    all_reduce,
    gather_items,
    parallelize_sequence,
    reduce_state,
    whole_images,
)

DEIT = dict(img_size=32, patch_size=4, embed_dim=16, depth=2, num_heads=2)
PVT = dict(img_size=64, embed_dims=(8, 16, 16, 16), depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 2))
SWIN = dict(img_size=64, embed_dim=8, depths=(1, 1, 2, 2), num_heads=(1, 2, 2, 2))
CSWIN = dict(img_size=64, embed_dim=8, depths=(1, 1, 1, 1), num_heads=(2, 2, 2, 2))
SURROUNDED = dict(gate=True, lepe=5, rope=True, cpe=True, mlp_conv=True)
WINDOWS = dict(class_token=False, global_pool="avg", window_size=3)
# Name, arguments, and sizes of images: rows of tokens that all processes have alike, and others.
CASES: dict[str, tuple[str, dict[str, Any], list[tuple[int, int]]]] = {
    "deit": ("inline_deit_tiny", DEIT, [(32, 32), (43, 30)]),
    "deit with pooling, φ": (
        "inline_deit_tiny",
        dict(DEIT, patch_size=16, img_size=128, global_pool="avg", attn_kwargs=dict(feature_map="relu_affine")),
        [(130, 50)],
    ),
    "deit in windows": ("inline_deit_tiny", dict(DEIT, **WINDOWS), [(43, 30)]),
    "deit without local residual": ("inline_deit_tiny", dict(DEIT, attn_kwargs=dict(local_residual=False)), [(43, 30)]),
    "softmax deit": ("inline_deit_tiny", dict(DEIT, attention="softmax"), [(43, 30)]),
    "linear deit": ("inline_deit_tiny", dict(DEIT, attention="linear"), [(43, 30)]),
    "linear deit in windows": ("inline_deit_tiny", dict(DEIT, attention="linear", **WINDOWS), [(43, 30)]),
    "enhanced deit": ("inline_deit_tiny", dict(DEIT, attention="enhanced"), [(43, 30)]),
    "pvt": ("inline_pvt_tiny", PVT, [(150, 70)]),
    "softmax pvt": ("pvt_tiny", PVT, [(150, 70)]),
    "swin": ("inline_swin_tiny", SWIN, [(150, 70)]),
    "swin in windows": ("inline_swin_tiny", dict(SWIN, window_size=3), [(150, 70)]),
    "softmax swin": ("inline_swin_tiny", dict(SWIN, attention="softmax", softmax_window_size=3), [(150, 70)]),
    "cswin": ("inline_cswin_tiny", CSWIN, [(150, 70)]),
    "cswin in stripes": ("inline_cswin_tiny", dict(CSWIN, window_size=3), [(150, 70)]),
    "softmax cswin": ("cswin_tiny", CSWIN, [(150, 70)]),
    "deit, surrounded": ("inline_deit_tiny", dict(DEIT, attn_kwargs=SURROUNDED), [(32, 32), (43, 30)]),
    "softmax deit, surrounded": (
        "inline_deit_tiny",
        dict(DEIT, attention="softmax", attn_kwargs=SURROUNDED),
        [(43, 30)],
    ),
    "linear deit in windows, surrounded": (
        "inline_deit_tiny",
        dict(DEIT, attention="linear", attn_kwargs=SURROUNDED, **WINDOWS),
        [(43, 30)],
    ),
    "cswin in stripes, surrounded": (
        "inline_cswin_tiny",
        dict(CSWIN, window_size=3, attn_kwargs=SURROUNDED),
        [(150, 70)],
    ),
}
FAST = ["deit", "enhanced deit", "pvt", "swin in windows", "cswin in stripes", "deit, surrounded"]


def check_sequence(plain: dict[str, Any]) -> int:
    """Compare the cases with whole models; 0 if nothing differs."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    group = SequenceGroup()
    check_collectives(group)
    check_state(group)
    for case in plain["cases"]:
        check_case(case)
    check_options()
    print("shared as whole")
    accelerator.end_training()
    return 0


def random_rows(group: SequenceGroup, *shape: int) -> tuple[Tensor, RowSharding, Tensor]:
    """Numbers that all processes know, how their rows are split, unevenly, and those of this process as a leaf."""
    torch.manual_seed(7)
    rows = RowSharding(tuple(rank * (rank + 1) for rank in range(group.size + 1)), group)
    whole = torch.randn(shape[0], rows.height, *shape[1:], dtype=torch.float64)
    return whole, rows, whole[:, rows.start : rows.end].clone().requires_grad_()


def check_collectives(group: SequenceGroup) -> None:
    """Values, and gradients of the sum over all processes."""
    whole, rows, own = random_rows(group, 2, 3, 4)
    weight = torch.randn(2, rows.height + 3, 3, 4, dtype=torch.float64)
    padded = nn.functional.pad(leaf := whole.clone().requires_grad_(), (0, 0, 0, 0, 2, 1))
    parts = [(start, end + 3) for start, end in zip(rows.bounds, rows.bounds[1:], strict=False)]
    expected = sum((padded[:, start:end] * weight[:, start:end]).sum() for start, end in parts)
    # Two rows above, more than process 1 has after process 0 with two.
    halo = add_halo(own, rows, 2, 1)
    assert torch.equal(halo, padded[:, slice(*parts[group.rank])])
    (halo * weight[:, slice(*parts[group.rank])]).sum().backward()
    assert own.grad is not None
    (grad,) = torch.autograd.grad(expected, leaf)
    torch.testing.assert_close(own.grad, grad[:, rows.start : rows.end])

    own.grad = None
    gathered = gather_items(own, rows.bounds, group)
    assert torch.equal(gathered, whole)
    (gathered * weight[:, 3:] * (group.rank + 1)).sum().backward()
    factor = group.size * (group.size + 1) / 2
    torch.testing.assert_close(own.grad, factor * weight[:, 3:][:, rows.start : rows.end])

    one = torch.tensor([1.0 + group.rank], requires_grad=True)
    total = all_reduce(one, group)
    assert total.item() == factor
    (total * (group.rank + 1)).backward()
    assert one.grad is not None
    assert one.grad.item() == factor


def check_state(group: SequenceGroup) -> None:
    """The state of all tokens, some of them masked, although one process has none."""
    torch.manual_seed(3)
    count = 5 * group.size
    k, v, tokens = (
        torch.randn(2, *shape, dtype=torch.float64) + 1e3 for shape in ((1, count, 2), (1, count, 3), (count, 4))
    )
    mask = torch.rand(2, count) < 0.7
    whole = KeyValueState.from_tokens(k, v, tokens, mask)
    # The last process has no tokens.
    parts = max(1, group.size - 1)
    start, end = (count * min(rank, parts) // parts for rank in (group.rank, group.rank + 1))
    own = slice(start, end)
    state = reduce_state(KeyValueState.from_tokens(k[:, :, own], v[:, :, own], tokens[:, own], mask[:, own]), group)
    assert torch.equal(state.count, whole.count)
    for name in ("k_mean", "v_mean", "token_mean", "covariance"):
        torch.testing.assert_close(getattr(state, name), getattr(whole, name), rtol=1e-10, atol=1e-9)


def make_pair(case: str) -> tuple[nn.Module, nn.Module]:
    """A model with weights that make every part count, and the same model in several processes."""
    name, arguments, _ = CASES[case]
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **arguments).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model, parallelize_sequence(copy.deepcopy(model))


def check_case(case: str) -> None:
    """Outputs and gradients."""
    whole, shared = make_pair(case)
    assert list(whole.state_dict()) == list(shared.state_dict())
    for size in CASES[case][2]:
        images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1)).double()
        outputs = [model(images) for model in (whole, shared)]
        # Positions are resized in float32.
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-6, atol=1e-6, msg=lambda text: f"{case}: {text}")
        for model, output in zip((whole, shared), outputs, strict=True):
            model.zero_grad()
            output.sin().sum().backward()
        for (name, ours), theirs in zip(shared.named_parameters(), whole.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            dist.all_reduce(ours.grad)
            difference = (ours.grad / dist.get_world_size() - theirs.grad).abs().max()
            assert difference <= 1e-6 * theirs.grad.abs().max() + 1e-12, (case, size, name, difference)


def check_options() -> None:
    """Gradient checkpointing, stochastic depth, half precision, copies, whole images, and what is refused."""
    whole, shared = make_pair("deit")
    images = torch.randn(2, 3, 43, 30, generator=torch.Generator().manual_seed(1)).double()
    expected = whole(images)
    copied: Any = copy.deepcopy(shared)
    torch.testing.assert_close(copied(images), expected, rtol=1e-6, atol=1e-6)
    copied.set_grad_checkpointing()
    grads = []
    for model in (shared, copied):
        model(images).sin().sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        half = [model(images.float()) for model in (whole.float(), shared.float())]
    torch.testing.assert_close(half[1], half[0], rtol=0.05, atol=0.05)

    with whole_images(shared), torch.no_grad():
        # In one process only: nothing waits for the others.
        if dist.get_rank() == 0:
            assert torch.equal(shared(images.float()), whole(images.float()))
            assert len(shared.forward_intermediates(images.float(), intermediates_only=True)) == 2
    with pytest.raises(ValueError, match="whole_images"):
        shared.forward_intermediates(images.float())
    with pytest.raises(ValueError, match=r"an image of 4 rows has 1 rows of tokens .* processes cannot share"):
        shared(images[:, :, :4].float())
    for options, problem in REFUSED.items():
        with pytest.raises(ValueError, match=problem):
            parallelize_sequence(timm.create_model("inline_deit_tiny", **{**DEIT, **dict(options)}))
    with pytest.raises(ValueError, match="cannot be split over processes: choose a model of this library"):
        parallelize_sequence(nn.Linear(2, 2))


REFUSED: dict[tuple[tuple[str, Any], ...], str] = {
    (("attention", "focused"),): "focused attention cannot be split over processes: use one of inline",
    (("attention", "mala"),): "mala attention cannot be split over processes: use one of inline",
    (("proj_drop_rate", 0.1),): "use proj_drop_rate=0",
    (("global_pool", ""),): "use global_pool='avg' or 'token'",
}
