"""Checks of attentions: the promises of docs/attentions.md, for attentions of this package and of others alike.

`check_attention(MyAttention)` needs no test framework. With pytest, `ATTENTION_CHECKS` makes each promise a test.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Block, CrossStripes, SquareWindows, WholeMap
from .layers._inference_block import attend_prefix
from .layers.base_attention import BaseAttention, join_head_groups
from .layers.registry import (
    ATTENTIONS,
    attention_name,
    constructor_types,
    contract_problem,
    find_attention,
    overrides,
)
from .models.inference import optimize_for_inference
from .models.inline_cswin import InLineCSWin
from .models.inline_deit import InLineDeiT
from .models.inline_pvt import InLinePVT
from .models.inline_swin import InLineSwin
from .ops import apply_weights
from .ops.local import add_convolution
from .ops.windows import merge_heads, padding_mask, window_reverse

__all__ = ["ATTENTION_CHECKS", "check_attention"]

# Maps of one token, one row, one column; odd and even; smaller and larger than the grid of learned positions.
SIZES = ((1, 1), (1, 6), (6, 1), (3, 5), (8, 6))
# A map that windows of 4 and stripes of 2 do not divide, so that they are padded.
SIZE, WINDOW, STRIPE = (5, 7), 4, 2
GRID = (4, 4)
LAYOUTS: dict[str, Callable[[], nn.Module]] = {
    "the whole map": WholeMap,
    "windows": lambda: SquareWindows(WINDOW, shifted=False),
    "shifted windows": lambda: SquareWindows(WINDOW, shifted=True),
    "stripes": lambda: CrossStripes(STRIPE),
}


class Broken(AssertionError):
    """A promise that an attention does not keep."""


def expect(condition: bool | Tensor, promise: str) -> None:
    """Raise Broken unless a condition holds."""
    if not condition:
        raise Broken(promise)


def expect_close(found: Tensor, expected: Tensor, promise: str, tolerance: float = 1e-9) -> None:
    """Raise Broken unless two tensors have the same shape and are nearly equal, relative to the larger values."""
    expect(found.shape == expected.shape, f"{promise} (shapes {tuple(found.shape)} and {tuple(expected.shape)})")
    largest = max(1.0, float(expected.abs().max())) if expected.numel() > 0 else 1.0
    difference = float((found - expected).abs().max()) / largest if expected.numel() > 0 else 0.0
    # This way round, NaN is broken, too.
    expect(difference <= tolerance, f"{promise} (they differ by {difference:.1e}, the tolerance is {tolerance:.0e})")


@dataclass
class Subject:
    """An attention that is checked.

    Attributes:
        kind: Its class.
        dim: Channels.
        num_heads: Heads.
        kwargs: Further arguments of the constructor.
    """

    kind: type[BaseAttention]
    dim: int
    num_heads: int
    kwargs: dict[str, Any]

    def new(self, seed: int = 0, **more: Any) -> BaseAttention:
        """Construct it, with the initial weights of a seed."""
        grid = {"grid": GRID} if self.kind.learns_grid else {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.kind(more.pop("dim", self.dim), self.num_heads, **{**grid, **self.kwargs, **more})

    def random(self, **more: Any) -> BaseAttention:
        """Construct it in float64 and evaluation mode, with no parameter at its initial value."""
        module = self.new(**more).double().eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
            module.project_parameters()
        return module

    def tokens(self, count: int, batch: int = 2, dim: int | None = None, seed: int = 1) -> Tensor:
        """Return random tokens in float64."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, count, dim or self.dim, generator=generator, dtype=torch.float64)

    def prefixes(self, *counts: int) -> list[int]:
        """Return numbers of prefix tokens: 0, and these if it takes any."""
        return [0, *counts] if self.kind.supports_prefix_tokens else [0]

    def takes(self, option: str) -> bool:
        """Return whether it takes `gate` or `rope`: the class does, and the constructor passes it on."""
        supported = self.kind.supports_gate if option == "gate" else self.kind.supports_rope
        return supported and option in constructor_types(self.kind)

    def layouts(self) -> dict[str, nn.Module]:
        """Return the layouts that it takes, by name."""
        return {name: make() for name, make in LAYOUTS.items() if self.kind.supports_windows or name == "the whole map"}

    @property
    def attends(self) -> bool:
        """Whether `attend` computes it, rather than a forward of its own."""
        return overrides(self.kind, "attend")


def check_contract(subject: Subject) -> None:
    """register_attention accepts the class: a subclass of BaseAttention with the arguments that models pass."""
    problem = contract_problem(subject.kind)
    expect(not problem, problem)


def check_construction(subject: Subject) -> None:
    """`device` and `dtype` are honoured; what the class does not support is refused with a ValueError."""
    module = subject.new(device="meta", dtype=torch.bfloat16)
    for name, parameter in module.named_parameters():
        expect(
            parameter.device.type == "meta" and parameter.dtype == torch.bfloat16,
            f"{name} is made with device and dtype, as the constructor was told (pass both on to it)",
        )
    kind = subject.kind
    for is_supported, flag, arguments in (
        (kind.supports_windows, "supports_windows", {"layout": SquareWindows(WINDOW, shifted=False)}),
        (kind.supports_prefix_tokens, "supports_prefix_tokens", {"num_prefix_tokens": 1}),
        (kind.supports_lepe, "supports_lepe", {"lepe": 3}),
        (kind.supports_gate or "gate" not in constructor_types(kind), "supports_gate", {"gate": True}),
        (kind.supports_rope or "rope" not in constructor_types(kind), "supports_rope", {"rope": True}),
    ):
        if not is_supported:
            what = f"{flag} is False, so the constructor refuses {', '.join(arguments)} with a ValueError"
            expect_refused(partial(subject.new, **arguments), what)
    for name in kind.no_weight_decay_names:
        expect(hasattr(module, name), f"no_weight_decay_names names parameters, but there is no {name}")


def expect_refused(call: Callable[[], Any], promise: str) -> None:
    """Raise Broken unless a call raises ValueError."""
    try:
        call()
    except ValueError:
        return
    raise Broken(promise)


def check_shapes(subject: Subject) -> None:
    """Tokens (batch, prefix + H·W, dim) of any map give finite tokens of the same shape and dtype."""
    for name, layout in subject.layouts().items():
        module = subject.random(layout=layout)
        for height, width in SIZES:
            for prefix in subject.prefixes(1, 3) if name == "the whole map" else [0]:
                x = subject.tokens(prefix + height * width)
                what = f"on {name} of a map of {height}×{width} with {prefix} prefix tokens"
                with torch.no_grad():
                    out = module(x, (height, width))
                expect(out.shape == x.shape, f"the output {what} is shaped as the tokens, not {tuple(out.shape)}")
                expect(out.dtype == x.dtype, f"the output {what} has the dtype of the tokens, not {out.dtype}")
                expect(out.isfinite().all(), f"the output {what} is finite")


def check_prefix_tokens(subject: Subject) -> None:
    """Prefix tokens come before the map; each attends to the map; the number is checked if it is given."""
    if not subject.kind.supports_prefix_tokens:
        module = subject.new().double()
        expect_refused(
            lambda: module(subject.tokens(17), (4, 4)), "supports_prefix_tokens is False, so they are refused"
        )
        return
    module = subject.random(num_prefix_tokens=2)
    x = subject.tokens(2 + 15, batch=1).requires_grad_()
    for token in range(2):
        (gradient,) = torch.autograd.grad(module(x, (3, 5))[0, token].square().sum(), x)
        expect(gradient[0, 2:].abs().max() > 0, f"the output of prefix token {token} depends on the tokens of the map")
    for count in (15, 16, 18):
        what = f"num_prefix_tokens=2 refuses {count} tokens for a map of 15 with a ValueError (call self.check_tokens)"
        expect_refused(partial(module, subject.tokens(count), (3, 5)), what)


def check_wrong_inputs(subject: Subject) -> None:
    """Tokens that do not fit the map or the channels are refused with a ValueError."""
    module = subject.new().double()
    wrong: dict[str, Callable[[], Tensor]] = {
        "too few tokens for the map": lambda: module(subject.tokens(15), (4, 4)),
        "other channels": lambda: module(subject.tokens(16, dim=subject.dim + 1), (4, 4)),
        "a map instead of tokens": lambda: module(subject.tokens(16).unflatten(1, (4, 4)), (4, 4)),
        "integers": lambda: module(subject.tokens(16).long(), (4, 4)),
    }
    for what, call in wrong.items():
        expect_refused(call, f"{what} are refused with a ValueError (call self.check_tokens in forward)")


def check_windows(subject: Subject) -> None:
    """Windows do not see each other, and keys at padding have no influence."""
    if not subject.kind.supports_windows:
        return
    module = subject.random(layout=SquareWindows(WINDOW, shifted=False))
    x = subject.tokens(SIZE[0] * SIZE[1])
    changed = x.unflatten(1, SIZE).clone()
    changed[:, :WINDOW, :WINDOW] += 1
    with torch.no_grad():
        before, after = module(x, SIZE).unflatten(1, SIZE), module(changed.flatten(1, 2), SIZE).unflatten(1, SIZE)
    promise = "tokens of one window have no influence on the other windows"
    expect_close(after[:, WINDOW:], before[:, WINDOW:], promise)
    expect_close(after[:, :, WINDOW:], before[:, :, WINDOW:], promise)
    expect(not torch.equal(after, before), "tokens of a window have an influence on it")
    if not subject.attends:
        return
    for name in ("windows", "shifted windows"):
        module = subject.random(layout=LAYOUTS[name]())
        with torch.no_grad():
            for q, k, v, windows in module.partition(x, SIZE):
                mask = padding_mask(k, windows)
                assert mask is not None
                padding = ~mask[:, None, :, None]
                out, other = module.attend(q, k, v, windows), module.attend(q, k + 3.0 * padding, v, windows)
                promise = "keys at padding have no influence on attend (mask them: ops.windows.padding_mask)"
                expect_close(other.masked_fill(padding, 0), out.masked_fill(padding, 0), promise)


def check_lepe(subject: Subject) -> None:
    """`lepe=3` adds a depthwise 3×3 convolution of the values to the map."""
    if not subject.kind.supports_lepe:
        return
    for name, layout in subject.layouts().items():
        module = subject.random(layout=layout, lepe=3)
        module.gate = None
        lepe = module.lepe
        expect(lepe is not None, "the constructor of BaseAttention gets lepe, and makes self.lepe")
        assert lepe is not None
        assert lepe.bias is not None
        x = subject.tokens(SIZE[0] * SIZE[1])
        with torch.no_grad():
            first = module(x, SIZE)
            lepe.bias += 1
            # A bias of the convolution is the same for all tokens; the output projection maps it.
            expected = first + F.linear(torch.ones(module.proj.in_features, dtype=x.dtype), module.proj.weight)
            expect_close(module(x, SIZE), expected, f"self.lepe is added before the projection, with {name}")


def check_gate(subject: Subject) -> None:
    """`gate=True` multiplies what is projected at the end, of all tokens, by `self.gate` of the same tokens."""
    if not subject.takes("gate"):
        return
    for name, layout in subject.layouts().items():
        for prefix in subject.prefixes(1) if name == "the whole map" else [0]:
            gated = subject.random(layout=layout, gate=True)
            expect(gated.gate is not None, "the constructor of BaseAttention gets gate, and makes self.gate")
            assert gated.gate is not None
            gated.add_module("proj", nn.Identity())
            plain = deepcopy(gated)
            plain.gate = None
            x, kernel_tokens = (subject.tokens(prefix + SIZE[0] * SIZE[1], seed=seed) for seed in (1, 2))
            with torch.no_grad():
                expected = plain(x, SIZE, kernel_tokens) * gated.gate(x)
                promise = f"self.gate of the tokens is multiplied before the projection, with {name} (project_out)"
                expect_close(gated(x, SIZE, kernel_tokens), expected, promise)


def check_rope(subject: Subject) -> None:
    """`rope=True` rotates queries and keys by their places: it counts on a map, but not on one of a single token."""
    if not subject.takes("rope"):
        return
    for name, layout in subject.layouts().items():
        for prefix in subject.prefixes(2) if name == "the whole map" else [0]:
            rotated = subject.random(layout=layout, rope=True)
            plain = deepcopy(rotated)
            plain.rope = False
            with torch.no_grad():
                x = subject.tokens(prefix + 1)
                promise = f"with {name} and {prefix} prefix tokens, neither they nor the token at (0, 0) are rotated"
                expect_close(rotated(x, (1, 1)), plain(x, (1, 1)), promise)
                x = subject.tokens(prefix + SIZE[0] * SIZE[1])
                difference = (rotated(x, SIZE) - plain(x, SIZE)).abs().amax(dim=(0, 2))
                expect(difference.min() > 1e-9, f"with {name} and {prefix} prefix tokens, rope changes every output")


def check_gradients(subject: Subject) -> None:
    """Every parameter and the tokens get finite gradients, and they are the derivative of forward."""
    for name, layout in subject.layouts().items():
        module = subject.random(layout=layout, lepe=name == "stripes" and subject.kind.supports_lepe)
        x = subject.tokens(SIZE[0] * SIZE[1]).requires_grad_()
        direction = subject.tokens(SIZE[0] * SIZE[1], seed=2)
        module(x, SIZE).square().mean().backward()
        for parameter, tensor in [*module.named_parameters(), ("x", x)]:
            what = f"with {name}, {parameter}"
            expect(tensor.grad is not None, f"{what} gets a gradient (parameters that are not used are deleted)")
            assert tensor.grad is not None
            expect(tensor.grad.isfinite().all(), f"{what} gets a finite gradient")
            expect(tensor.grad.abs().max() > 1e-10, f"{what} gets a gradient other than zero")
        assert x.grad is not None
        step = 1e-6
        with torch.no_grad():
            ahead, behind = ((module(x + s * step * direction, SIZE)).square().mean() for s in (1, -1))
        expected = (ahead - behind) / (2 * step)
        found = (x.grad * direction).sum()
        scale = float(x.grad.norm() * direction.norm())
        expect_close(found / scale, expected / scale, f"the gradient with {name} is the derivative of forward", 1e-5)


def check_batch(subject: Subject) -> None:
    """Images of a batch have no influence on each other, so that a batch may be computed in parts."""
    for name, layout in subject.layouts().items():
        module = subject.random(layout=layout)
        x = subject.tokens(SIZE[0] * SIZE[1], batch=3)
        with torch.no_grad():
            alone = torch.cat([module(image[None], SIZE) for image in x])
            expect_close(module(x, SIZE), alone, f"with {name}, an image gives the same alone and in a batch")


def check_purity(subject: Subject) -> None:
    """forward changes neither its input nor its state, takes `kernel_tokens`, and tokens that are not contiguous."""
    module = subject.random()
    x = subject.tokens(SIZE[0] * SIZE[1])
    before, state = x.clone(), {name: value.clone() for name, value in module.state_dict().items()}
    with torch.no_grad():
        first, second = module(x, SIZE), module(x, SIZE)
        expect(torch.equal(x, before), "forward does not change the tokens that it is given")
        expect(torch.equal(first, second), "in evaluation mode, forward gives the same bits each time")
        for name, value in module.state_dict().items():
            expect(torch.equal(value, state[name]), f"in evaluation mode, forward does not change {name}")
        # kernel_tokens are x by default; blocks always pass them, by position.
        expect_close(module(x, SIZE, x), first, "forward takes kernel_tokens, and x as kernel_tokens changes nothing")
        strided = x.transpose(1, 2).contiguous().transpose(1, 2)
        expect_close(module(strided, SIZE), first, "tokens need not be contiguous")
        # Another map in between, for what a module might keep of the last one.
        module(subject.tokens(12), (3, 4))
        module(subject.tokens(12), (4, 3))
        expect(torch.equal(module(x, SIZE), first), "maps of other sizes in between have no influence")


def check_dropout(subject: Subject) -> None:
    """`proj_drop` acts in training mode only."""
    module, plain = subject.random(proj_drop=0.5), subject.random()
    x = subject.tokens(SIZE[0] * SIZE[1])
    with torch.no_grad():
        expect(torch.equal(module(x, SIZE), plain(x, SIZE)), "in evaluation mode, proj_drop has no effect")
        module.train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            expect(not torch.equal(module(x, SIZE), module(x, SIZE)), "in training mode, proj_drop drops values")


def check_half_precision(subject: Subject) -> None:
    """In bfloat16 and float16, and under autocast, the output is close to that in float32: 8 times the precision."""
    # Wide heads: narrow ones amplify the rounding of single values.
    dim = 16 * subject.num_heads
    for name, layout in subject.layouts().items():
        x = subject.tokens(SIZE[0] * SIZE[1], dim=dim).float()
        for dtype in (torch.bfloat16, torch.float16):
            module = subject.new(layout=layout, dim=dim).eval()
            with torch.no_grad():
                expected = module(x, SIZE)
                with torch.autocast("cpu", dtype=dtype):
                    under_autocast = module(x, SIZE)
                half = module.to(dtype)(x.to(dtype), SIZE)
            for out, way in ((under_autocast, "under autocast to"), (half, "in")):
                what = f"with {name} {way} {dtype}"
                expect(out.dtype == dtype, f"the output {what} has this dtype, not {out.dtype}")
                error = float((out.float() - expected).norm() / expected.norm())
                bound = 8 * torch.finfo(dtype).eps
                expect(error <= bound, f"the output {what} is close to float32 (off by {error:.1e} of {bound:.1e})")


def check_state_dict(subject: Subject) -> None:
    """The state dict has floating-point tensors only, and holds all that a copy needs."""
    module = subject.random()
    x = subject.tokens(SIZE[0] * SIZE[1])
    for name, value in module.state_dict().items():
        expect(
            value.is_floating_point(),
            f"{name} in the state dict is floating-point, as weight files are (register_buffer(…, persistent=False))",
        )
    loaded = subject.new(seed=1).double().eval()
    loaded.load_state_dict(module.state_dict())
    with torch.no_grad():
        expected = module(x, SIZE)
        expect(torch.equal(loaded(x, SIZE), expected), "a module with the same state dict gives the same output")
        copied = deepcopy(module)
        expect(torch.equal(copied(x, SIZE), expected), "a copy gives the same output")
        for parameter in copied.parameters():
            parameter.zero_()
        expect(torch.equal(module(x, SIZE), expected), "a copy has weights of its own")


def check_initialization(subject: Subject) -> None:
    """Equal seeds give equal weights, and reset_parameters initialises all that is not a layer of torch."""
    first, second = subject.new(), subject.new()
    for (name, value), other in zip(first.named_parameters(), second.parameters(), strict=True):
        expect(value.isfinite().all(), f"{name} is initialised with finite values")
        expect(torch.equal(value, other), f"{name} is the same after torch.manual_seed with the same seed")
    empty = subject.new(device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*empty.parameters(), *empty.buffers()]:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
    for part in empty.modules():
        if callable(reset := getattr(part, "reset_parameters", None)):
            reset()
    for name, tensor in [*empty.named_parameters(), *empty.named_buffers()]:
        what = f"{name} is initialised by reset_parameters of the module that has it, as models on the meta device need"
        expect(tensor.isfinite().all(), what)


def check_meta_device(subject: Subject) -> None:
    """forward works on the meta device, where parameters and operations are counted."""
    module = subject.new(device="meta")
    out = module(torch.empty(2, SIZE[0] * SIZE[1], subject.dim, device="meta"), SIZE)
    expect(out.device.type == "meta", "forward creates tensors on the device of the tokens")


def check_attention_weights(subject: Subject) -> None:
    """If there is attention_weights, forward is weights @ v, plus the kernels, projected; masks hide tokens."""
    if not overrides(subject.kind, "attention_weights"):
        return
    for name, layout in subject.layouts().items():
        prefix = 1 if name == "the whole map" and subject.kind.supports_prefix_tokens else 0
        module = subject.random(layout=layout, lepe=name == "stripes" and subject.kind.supports_lepe)
        x, kernel_tokens = (subject.tokens(prefix + SIZE[0] * SIZE[1], seed=seed) for seed in (1, 2))
        with torch.no_grad():
            for chunk in (100, 6):
                out = forward_by_weights(module, x, kernel_tokens, chunk)
                promise = f"with {name}, forward is attention_weights @ v, plus the kernels, through proj"
                expect_close(out, module(x, SIZE, kernel_tokens), f"{promise} ({chunk} queries at a time)")
            for q, k, v, windows in module.partition(x, SIZE):
                check_masks(module, q, k, v, windows, name)


def forward_by_weights(module: BaseAttention, x: Tensor, kernel_tokens: Tensor, chunk: int) -> Tensor:
    """Compute forward from explicit weights, so many queries at a time."""
    outputs = []
    for q, k, v, windows in module.partition(x, SIZE):
        rows = [
            apply_weights(module.attention_weights(q[:, :, first : first + chunk], k, v, windows, first=first), v)
            for first in range(0, q.shape[2], chunk)
        ]
        out = merge_heads(torch.cat(rows, dim=2))
        kernels = module.local_kernels(kernel_tokens, windows), module.static_kernels(windows)
        outputs.append(window_reverse(add_convolution(out, v, *kernels, windows), windows))
    return module.project_out(join_head_groups(outputs), x)


def check_masks(module: BaseAttention, q: Tensor, k: Tensor, v: Tensor, windows: Any, layout: str) -> None:
    """Check attn_mask of attention_weights for one head group."""
    weights = module.attention_weights(q, k, v, windows)
    queries, count = q.shape[2], k.shape[2]
    shape = (q.shape[0], q.shape[1] * module.matrices_per_head, queries, count)
    expect(weights.shape == shape, f"attention_weights are (batch · windows, matrices, queries, tokens), {shape}")
    mask = torch.rand(1, 1, queries, count, generator=torch.Generator().manual_seed(3)) < 0.6
    mask[..., 2, :] = False
    masked = module.attention_weights(q, k, v, windows, mask)
    expect(
        masked.isfinite().all(), f"with {layout}, masked weights are finite, also those of a query that sees nothing"
    )
    expect(torch.all(masked[~mask.expand_as(masked)] == 0), f"with {layout}, weights of masked tokens are zero")
    everything = module.attention_weights(q, k, v, windows, torch.ones_like(mask))
    expect_close(everything, weights, f"with {layout}, a mask that hides nothing changes nothing")
    part = module.attention_weights(q[:, :, 3:5], k, v, windows, mask[:, :, 3:5], first=3)
    expect_close(part, masked[:, :, 3:5], f"with {layout}, the weights of some queries are those rows of all (first)")


def check_row_wise(subject: Subject) -> None:
    """With row_wise, attend of the first queries alone gives the first rows of attend."""
    if not subject.kind.row_wise or not subject.kind.supports_prefix_tokens:
        return
    block = Block(subject.random(num_prefix_tokens=2), subject.dim).double().eval()
    x = subject.tokens(2 + SIZE[0] * SIZE[1])
    with torch.no_grad():
        expected = block.attention_branch(x, SIZE)[:, :2]
        promise = "row_wise is True, so attend of the prefix tokens alone gives the first rows of forward"
        expect_close(attend_prefix(block, x, SIZE), expected, promise)


def check_models(subject: Subject) -> None:
    """Models of every family train with it, take images of any size, and optimize_for_inference keeps their output."""
    kind, heads = subject.kind, subject.num_heads
    attn_kwargs = {name: value for name, value in subject.kwargs.items() if name in kind.attn_kwargs_names}
    common = {"attn_kwargs": attn_kwargs, "num_classes": 3, "img_size": 64}
    pyramid = {"depths": (1, 1), "num_heads": (heads, heads)}
    families: list[tuple[type[nn.Module], dict[str, Any]]] = [
        (InLineDeiT, {"embed_dim": subject.dim, "depth": 1, "num_heads": heads, "class_token": False}),
        (InLinePVT, {"embed_dims": (subject.dim,) * 2, "mlp_ratios": (2.0, 2.0), **pyramid}),
        (InLineSwin, {"embed_dim": subject.dim, **pyramid}),
    ]
    families[0][1]["global_pool"] = "avg"
    if kind.supports_prefix_tokens:
        families.append((InLineDeiT, {"embed_dim": subject.dim, "depth": 2, "num_heads": heads}))
    if kind.supports_lepe:
        families.append((InLineCSWin, {"embed_dim": subject.dim, **pyramid}))
    with named(kind) as attention, torch.random.fork_rng(devices=[]):
        for family, arguments in families:
            torch.manual_seed(0)
            what = f"in {family.__name__}"
            model = family(attention=attention, **common, **arguments)
            images = torch.randn(2, 3, 64, 64)
            model(images).square().sum().backward()
            for name, parameter in model.named_parameters():
                is_finite = parameter.grad is not None and bool(parameter.grad.isfinite().all())
                expect(is_finite, f"{what}, {name} gets a finite gradient")
            model.eval()
            optimized = optimize_for_inference(model, compile=False)
            for size in ((64, 64), (48, 80)):
                images = torch.randn(1, 3, *size)
                with torch.no_grad():
                    expected = model(images)
                    promise = f"{what}, optimize_for_inference keeps the output for images of {size[0]}×{size[1]}"
                    expect_close(optimized(images), expected, promise, 1e-4)


@contextmanager
def named(kind: type[BaseAttention]) -> Iterator[str]:
    """Return a context in which an attention has a name that models take."""
    if kind in ATTENTIONS.values():
        yield attention_name(kind)
        return
    # No class can be registered under this name.
    name = "checked attention"
    ATTENTIONS[name] = kind
    try:
        yield name
    finally:
        del ATTENTIONS[name]


def check_compile(subject: Subject) -> None:
    """torch.compile records forward as one graph."""
    torch.compiler.reset()
    for name, layout in subject.layouts().items():
        module = subject.random(layout=layout)
        compiled = torch.compile(module, fullgraph=True, backend="eager", dynamic=False)
        x = subject.tokens(SIZE[0] * SIZE[1])
        with torch.no_grad():
            expect_close(compiled(x, SIZE), module(x, SIZE), f"with {name}, forward is one graph for torch.compile")


# What is checked, by name. The docstrings are the promises of docs/attentions.md.
ATTENTION_CHECKS: dict[str, Callable[[Subject], None]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_contract,
        check_construction,
        check_shapes,
        check_prefix_tokens,
        check_wrong_inputs,
        check_windows,
        check_lepe,
        check_gate,
        check_rope,
        check_gradients,
        check_batch,
        check_purity,
        check_dropout,
        check_half_precision,
        check_state_dict,
        check_initialization,
        check_meta_device,
        check_attention_weights,
        check_row_wise,
        check_models,
        check_compile,
    )
}
# Takes seconds, because it imports the compiler.
SLOW_CHECKS = ("compile",)


def check_attention(
    attention: type[BaseAttention] | str,
    *,
    dim: int = 32,
    num_heads: int = 4,
    checks: Sequence[str] | None = None,
    **kwargs: Any,
) -> None:
    """Check that an attention keeps the promises of docs/attentions.md, as those of this package do.

    Args:
        attention: The class, or the name that it is registered under.
        dim: Channels to check it with.
        num_heads: Heads, an even number; half precision is checked with 16 · num_heads channels.
        checks: Names of ATTENTION_CHECKS; None = all but "compile".
        **kwargs: Further arguments of its constructor.

    Raises:
        AssertionError: Promises are broken; the message lists them, one per line.
        ValueError: There is no such attention or check.
    """
    kind = find_attention(attention) if isinstance(attention, str) else attention
    for name in checks or ():
        if name not in ATTENTION_CHECKS:
            raise ValueError(f"there is no check {name!r}: choose among {', '.join(ATTENTION_CHECKS)}")
    subject = Subject(kind, dim, num_heads, kwargs)
    check_contract(subject)
    broken: list[str] = []
    first_error: Exception | None = None
    for name in checks or [name for name in ATTENTION_CHECKS if name not in SLOW_CHECKS]:
        try:
            ATTENTION_CHECKS[name](subject)
        except Broken as error:
            broken.append(f"{name}: {error}")
            first_error = first_error or error
        # The module may fail in any way: that breaks the promise, too.
        except Exception as error:
            doc = (ATTENTION_CHECKS[name].__doc__ or "").strip()
            problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            broken.append(f"{name}: {doc} It failed with {problem}")
            first_error = first_error or error
    if broken:
        lines = "\n".join(f"- {line}" for line in broken)
        count = "1 promise" if len(broken) == 1 else f"{len(broken)} promises"
        raise AssertionError(f"{kind.__name__} breaks {count} of an attention:\n{lines}") from first_error
