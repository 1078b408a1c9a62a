"""Hooks on attention: show every attention layer of a forward pass, one after the other.

Our own layers provide what they compute with (`BaseAttention.partition`, `BaseAttention.attention_weights`). Those of
timm call torch's `scaled_dot_product_attention`: each is called a second time, outside the model, and the arguments of
that function are recorded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..layers import AttentionAdapter, BaseAttention, SoftmaxAttention
from ..layers.base_attention import HeadGroup, join_head_groups
from ..layers.registry import attention_name, overrides
from ..ops import softmax_weights
from ..ops.local import add_kernels
from ..ops.weights import split_values
from ..ops.windows import Windows, covers_map, merge_heads, window_partition, window_reverse
from ..utils.validation import require
from .layer import PADDING, PREFIX, Convolution, Layer, MaskFunction

# Called with a layer: returns an output (batch · windows, heads, tokens, width) that replaces the layer's, or None.
Visit = Callable[[Layer], Tensor | None]


@torch.no_grad()
def watch(model: nn.Module, images: Tensor, visit: Callable[[Layer], Any]) -> Tensor:
    """Run a model, and call `visit` with each attention layer. Nothing of a layer is kept afterwards.

    Args:
        model: A model of this library, or any ViT, DeiT or Swin of timm, in evaluation mode.
        images: (batch, channels, H, W).
        visit: Called with each layer, in order.

    Returns:
        The output of the model, which is not changed.
    """

    def show(layer: Layer) -> None:
        visit(layer)

    with visited(model, images, show):
        return model(images)


@torch.no_grad()
def run_masked(model: nn.Module, images: Tensor, mask_function: MaskFunction) -> Tensor:
    """Run a model with masked attention in every layer.

    Attention is computed as if masked tokens did not exist; convolutions that the layer adds ignore them, too.

    Args:
        model: See watch.
        images: (batch, channels, H, W).
        mask_function: Called with a layer and the first and the last (exclusive) of some queries; returns which tokens
            they may attend to, (windows, queries, tokens).

    Returns:
        The output of the model.
    """
    with visited(model, images, lambda layer: layer.output(mask_function)):
        return model(images)


@contextmanager
def visited(model: nn.Module, images: Tensor, visit: Visit) -> Iterator[None]:
    """Return a context in which the attention layers of a model are visited while it runs on these images."""
    model = getattr(model, "_orig_mod", model)
    if model.training:
        raise ValueError("the model is in training mode, where dropout makes attention random: call model.eval() first")
    hooks = []
    # The maps (batch, H, W, channels) that the blocks of timm's Swin get.
    sizes: dict[nn.Module, tuple[int, int]] = {}

    def record_size(block: nn.Module, args: Any) -> None:
        sizes[block] = (args[0].shape[1], args[0].shape[2])

    for name, module in model.named_modules():
        parent = model.get_submodule(name.rpartition(".")[0])
        find_places: Places | None = None
        if hasattr(parent, "shift_size") and hasattr(parent, "window_size"):
            find_places = partial(swin_places, parent, sizes)
        if isinstance(module, AttentionAdapter):
            require_weights(name, module.attention)
            hook: Callable[..., Any] = partial(visit_adapter, name, visit, find_places)
        elif isinstance(module, BaseAttention) and not isinstance(parent, AttentionAdapter):
            require_weights(name, module)
            hook, find_places = partial(visit_own, name, visit), None
        elif isinstance(getattr(module, "fused_attn", None), bool):
            hook = partial(visit_timm, name, visit, find_places or partial(plain_places, model, images))
        else:
            continue
        if find_places is not None:
            hooks.append(parent.register_forward_pre_hook(record_size))
        hooks.append(module.register_forward_hook(hook, with_kwargs=True))
    if not hooks:
        raise ValueError(
            f"{type(model).__name__} has no attention that can be inspected: use a model of this library, or a "
            "ViT, DeiT or Swin of timm"
        )
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def require_weights(name: str, attention: BaseAttention) -> None:
    """Refuse an attention that defines no attention weights."""
    require(
        overrides(type(attention), "attention_weights"),
        f"{name} ({type(attention).__name__}) has no attention weights that could be inspected: define "
        "attention_weights, if it has an N×N form, or analyze models with other attention",
    )


def visit_own(name: str, visit: Visit, attn: BaseAttention, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
    """Visit a BaseAttention: a forward hook, after its name and `visit`."""
    given = signature(attn.forward).bind(*args, **kwargs).arguments
    kernel_tokens = given["x"] if given.get("kernel_tokens") is None else given["kernel_tokens"]
    outputs = []
    for group in attn.partition(given["x"], given["feat_size"]):
        layer = layer_of_head_group(name, attn, group, kernel_tokens)
        replaced = visit(layer)
        if replaced is not None:
            joined = merge_heads(replaced)
            outputs.append(window_reverse(joined, group.windows) if layer.sees_map else joined)
    return attn.project_out(join_head_groups(outputs).to(output.dtype), given["x"]) if outputs else None


def visit_adapter(
    name: str,
    visit: Visit,
    find_places: "Places | None",
    adapter: AttentionAdapter,
    args: Any,
    kwargs: Any,
    output: Tensor,
) -> Tensor | None:
    """Visit an attention that was replaced: a forward hook, after its name, `visit` and, for Swin, places of tokens."""
    given = signature(adapter.forward).bind(*args, **kwargs).arguments
    x, attn = given["x"], adapter.attention
    (group,) = attn.partition(x, adapter.map_size(x))
    layer = layer_of_head_group(name, attn, group, x)
    if isinstance(attn, SoftmaxAttention):
        bias, own = adapter.score_bias(**given), attn.score_bias(group.k, group.windows)
        if bias is not None:
            bias = bias if own is None else own + bias
            q = attn.map_queries(group.q)
            layer = replace(layer, weights_function=partial(weights_of_timm, q, group.k, bias, None))
    if find_places is not None:
        size, places = find_places(group.q)
        layer = replace(layer, size=size, places=places)
    replaced = visit(layer)
    return None if replaced is None else attn.project_out(merge_heads(replaced).to(output.dtype), x)


def layer_of_head_group(name: str, attn: BaseAttention, group: HeadGroup, kernel_tokens: Tensor) -> Layer:
    """Return what an attention computes for one head group; kernel_tokens as in BaseAttention.forward."""
    q, k, v, windows = group
    # Each matrix of weights is shown as a head, with its part of the values. What RALA has behind the keys is not one.
    matrices = attn.matrices_per_head
    shown = (q, k[..., : q.shape[3]])
    shown_q, shown_k = (x if matrices == 1 else x.repeat_interleave(matrices, dim=1) for x in shown)
    return Layer(
        name if windows.num_head_groups == 1 else f"{name} ({windows.head_group + 1} of {windows.num_head_groups})",
        attention_name(type(attn)),
        (windows.map_height, windows.map_width),
        shown_q,
        shown_k,
        split_values(v, matrices),
        places_in_windows(windows, q.shape[2], q.device),
        k.shape[2] == q.shape[2],
        lambda first, last, mask: attn.attention_weights(q[:, :, first:last], k, v, windows, mask, first),
        convolution_of_head_group(attn, group, kernel_tokens),
    )


def convolution_of_head_group(attn: BaseAttention, group: HeadGroup, kernel_tokens: Tensor) -> Convolution | None:
    """Return the convolution that an attention adds for one head group: dynamic and static kernels as one."""
    heads, windows = group.q.shape[1] * attn.matrices_per_head, group.windows
    kernels, static, bias = attn.local_kernels(kernel_tokens, windows), attn.static_kernels(windows), None
    if static is not None:
        weight = static[0].squeeze(1)
        if kernels is not None:
            weight = add_kernels(weight, kernels.unflatten(2, (3, 3)))
        kernels = weight.flatten(-2).expand(group.q.shape[0], -1, -1)
        bias = static[1].unflatten(0, (heads, -1))
    if kernels is None:
        return None
    return Convolution(kernels.unflatten(1, (heads, -1)), bias, (windows.window_height, windows.window_width))


def places_in_windows(windows: Windows, tokens: int, device: torch.device) -> Tensor:
    """See Layer.places."""
    places = torch.arange(windows.map_height * windows.map_width, device=device)
    if covers_map(windows):
        return F.pad(places, (tokens - len(places), 0), value=PREFIX).unsqueeze(0)
    # The partition pads with zeros: count from 1.
    places = window_partition(places.view(1, -1, 1) + 1, windows).squeeze(-1) - 1
    return torch.where(places < 0, PADDING, places)


class Intercept(TorchFunctionMode):
    """A context in which calls of scaled_dot_product_attention go to a handler instead."""

    def __init__(self, handler: Callable[..., Tensor]) -> None:
        super().__init__()
        self.handler = handler

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchFunctionMode."""
        if function is F.scaled_dot_product_attention:
            return self.handler(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


# From queries (batch · windows, heads, tokens, width) to (H, W) of the map and Layer.places.
Places = Callable[[Tensor], tuple[tuple[int, int], Tensor]]


def visit_timm(
    name: str, visit: Visit, find_places: Places, module: Any, args: Any, kwargs: Any, output: Tensor
) -> Tensor | None:
    """Visit an attention of timm: a forward hook, after its name, `visit` and where its tokens are."""
    calls, is_replaced = 0, False

    def attend(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, **options: Any
    ) -> Tensor:
        nonlocal calls, is_replaced
        calls += 1
        if calls > 1 or options.get("is_causal") or options.get("enable_gqa"):
            raise ValueError(f"{name} ({type(module).__name__}) is not plain softmax attention: it cannot be shown")
        scale = options.get("scale")
        # Attention pooling has learned queries, which are not tokens of the image.
        if q.shape[2] == k.shape[2]:
            size, places = find_places(q)
            weights = partial(weights_of_timm, q, k, attn_mask, scale)
            replaced = visit(Layer(name, "softmax", size, q, k, v, places, True, weights))
            if replaced is not None:
                is_replaced = True
                return replaced
        return F.scaled_dot_product_attention(q, k, v, attn_mask, scale=scale)

    # A second call, outside the model: the hooked call itself is not changed.
    was_fused, module.fused_attn = module.fused_attn, True
    try:
        with Intercept(attend):
            again = type(module).forward(module, *args, **kwargs)
    finally:
        module.fused_attn = was_fused
    return again if is_replaced else None


def weights_of_timm(
    q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None, first: int, last: int, attn_mask: Tensor | None
) -> Tensor:
    """See WeightsFunction, after arguments of scaled_dot_product_attention, whose mask may be boolean or a bias."""
    bias = mask if mask is None or mask.shape[-2] == 1 else mask[..., first:last, :]
    if bias is not None and bias.dtype == torch.bool:
        attn_mask, bias = bias if attn_mask is None else bias & attn_mask, None
    return softmax_weights(q[:, :, first:last], k, scale=scale, bias=bias, attn_mask=attn_mask)


def plain_places(model: nn.Module, images: Tensor, q: Tensor) -> tuple[tuple[int, int], Tensor]:
    """See Places, for a transformer with one window: prefix tokens, then the map, row by row."""
    tokens, prefix = q.shape[2], int(getattr(model, "num_prefix_tokens", 0))
    embed: Any = getattr(model, "patch_embed", None)
    size = embed.dynamic_feat_size(images.shape[-2:]) if hasattr(embed, "dynamic_feat_size") else (0, 0)
    if prefix + size[0] * size[1] != tokens:
        size = (isqrt(tokens - prefix),) * 2
    if prefix + size[0] * size[1] != tokens:
        raise ValueError(f"{tokens} tokens of {type(model).__name__} do not make a map: their places are unknown")
    places = torch.arange(size[0] * size[1], device=q.device)
    return (size[0], size[1]), F.pad(places, (prefix, 0), value=PREFIX).unsqueeze(0)


def swin_places(block: Any, sizes: dict[nn.Module, tuple[int, int]], q: Tensor) -> tuple[tuple[int, int], Tensor]:
    """See Places, for a block of timm's Swin, which rolls the map before it pads it."""
    height, width = sizes[block]
    (high, wide), (up, left) = block.window_size, block.shift_size
    places = torch.arange(height * width, device=q.device).view(height, width)
    places = torch.roll(places, shifts=(-up, -left), dims=(0, 1))
    places = F.pad(places, (0, -width % wide, 0, -height % high), value=PADDING)
    places = places.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).transpose(1, 2)
    return (height, width), places.reshape(-1, high * wide)
