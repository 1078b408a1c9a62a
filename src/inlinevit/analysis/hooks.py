"""Hooks on attention: show every attention layer of a forward pass, one after the other.

Our own layers provide what they compute with (`BaseAttention.partition`, `BaseAttention.attention_weights`). Those of
timm call torch's `scaled_dot_product_attention`: each is called a second time, outside the model, and the arguments of
that function are recorded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isqrt
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..layers import ATTENTIONS, BaseAttention
from ..layers.base_attention import HeadGroup, join_head_groups
from ..layers.layouts import Windows, covers_map, merge_heads, window_partition, window_reverse
from ..ops import softmax_weights
from .layer import PADDING, PREFIX, Convolution, Layer, See

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
def run_masked(model: nn.Module, images: Tensor, see: See) -> Tensor:
    """Run a model with masked attention in every layer.

    Attention is computed as if masked tokens did not exist; convolutions that the layer adds ignore them, too.

    Args:
        model: See watch.
        images: (batch, channels, H, W).
        see: Which tokens queries may attend to.

    Returns:
        The output of the model.
    """
    with visited(model, images, lambda layer: layer.output(see)):
        return model(images)


@contextmanager
def visited(model: nn.Module, images: Tensor, visit: Visit) -> Iterator[None]:
    """Return a context in which the attention layers of a model are visited while it runs on these images."""
    model = getattr(model, "_orig_mod", model)
    if model.training:
        raise ValueError("the model is in training mode, where dropout makes attention random: call model.eval() first")
    hooks = []
    found = False
    for name, module in model.named_modules():
        if isinstance(module, BaseAttention):
            hook: Callable[..., Any] = own_hook(name, visit)
        elif isinstance(getattr(module, "fused_attn", None), bool):
            parent = model.get_submodule(name.rpartition(".")[0])
            if hasattr(parent, "shift_size") and hasattr(parent, "window_size"):
                sizes: dict[str, tuple[int, int]] = {}
                hooks.append(parent.register_forward_pre_hook(size_hook(sizes)))
                hook = timm_hook(name, visit, swin_places(parent, sizes))
            else:
                hook = timm_hook(name, visit, plain_places(model, images))
        else:
            continue
        found = True
        hooks.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        if not found:
            raise ValueError(
                f"{type(model).__name__} has no attention that can be inspected: use a model of this library, or a "
                "ViT, DeiT or Swin of timm"
            )
        yield
    finally:
        for handle in hooks:
            handle.remove()


def own_hook(name: str, visit: Visit) -> Callable[..., Tensor | None]:
    """Return a forward hook for a BaseAttention."""

    def hook(attn: BaseAttention, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
        x, feat_size, context = attention_arguments(*args, **kwargs)
        outputs = []
        for group in attn.partition(x, feat_size):
            layer = layer_of_head_group(name, attn, group, context)
            replaced = visit(layer)
            if replaced is not None:
                joined = merge_heads(replaced)
                outputs.append(joined if not layer.sees_map else window_reverse(joined, group.windows))
        return attn.proj_drop(attn.proj(join_head_groups(outputs).to(output.dtype))) if outputs else None

    return hook


def attention_arguments(
    x: Tensor, feat_size: tuple[int, int], context: Tensor | None = None
) -> tuple[Tensor, tuple[int, int], Tensor]:
    """Return the arguments of BaseAttention.forward, however they were passed."""
    return x, feat_size, x if context is None else context


def layer_of_head_group(name: str, attn: BaseAttention, group: HeadGroup, context: Tensor) -> Layer:
    """Return what an attention computes for one head group; context is that of BaseAttention.forward."""
    q, k, v, windows = group

    def weights(first: int, last: int, attn_mask: Tensor | None) -> Tensor:
        return attn.attention_weights(q[:, :, first:last], k, v, windows, attn_mask, first)

    return Layer(
        name if windows.num_head_groups == 1 else f"{name} ({windows.head_group + 1} of {windows.num_head_groups})",
        next(word for word, kind in ATTENTIONS.items() if type(attn) is kind),
        (windows.map_height, windows.map_width),
        q,
        k,
        v,
        places_in_windows(windows, q.shape[2], q.device),
        k.shape[2] == q.shape[2],
        weights,
        convolution_of_head_group(attn, group, context),
    )


def convolution_of_head_group(attn: BaseAttention, group: HeadGroup, context: Tensor) -> Convolution | None:
    """Return the convolution that an attention adds for one head group: dynamic and static kernels as one."""
    kernels, static, bias = attn.local_kernels(context, group.windows), attn.static_kernels(group.windows), None
    if static is not None:
        weight, bias = static
        weight = weight.flatten(1).expand(group.q.shape[0], -1, -1)
        kernels = weight if kernels is None else kernels + weight
    if kernels is None:
        return None
    heads = group.q.shape[1]
    return Convolution(
        kernels.unflatten(1, (heads, -1)),
        None if bias is None else bias.unflatten(0, (heads, -1)),
        (group.windows.height, group.windows.width),
    )


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


def timm_hook(name: str, visit: Visit, find_places: Places) -> Callable[..., Tensor | None]:
    """Return a forward hook for an attention of timm."""

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
        replacements: list[Tensor] = []
        calls = 0

        def attend(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Tensor:
            nonlocal calls
            calls += 1
            if calls > 1 or is_causal or enable_gqa:
                raise ValueError(f"{name} ({type(module).__name__}) is not plain softmax attention: it cannot be shown")
            # Attention pooling has learned queries, which are not tokens of the image.
            if q.shape[2] == k.shape[2]:
                size, places = find_places(q)
                layer = Layer(
                    name, "softmax", size, q, k, v, places, True, softmax_weights_function(q, k, attn_mask, scale)
                )
                replaced = visit(layer)
                if replaced is not None:
                    replacements.append(replaced)
                    return replaced
            return F.scaled_dot_product_attention(q, k, v, attn_mask, scale=scale)

        # A second call, outside the model: the hooked call itself is not changed.
        with fused(module), Intercept(attend):
            again = cast(Any, type(module)).forward(module, *args, **kwargs)
        return again if replacements else None

    return hook


@contextmanager
def fused(module: nn.Module) -> Iterator[None]:
    """Return a context in which an attention of timm calls scaled_dot_product_attention."""
    attention = cast(Any, module)
    before, attention.fused_attn = attention.fused_attn, True
    try:
        yield
    finally:
        attention.fused_attn = before


def softmax_weights_function(q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None) -> Callable[..., Tensor]:
    """Return what Layer.weights_function needs; mask is that of scaled_dot_product_attention."""

    def weights(first: int, last: int, attn_mask: Tensor | None) -> Tensor:
        part = mask if mask is None or mask.shape[-2] == 1 else mask[..., first:last, :]
        if part is None or part.dtype != torch.bool:
            return softmax_weights(q[:, :, first:last], k, scale=scale, bias=part, attn_mask=attn_mask)
        return softmax_weights(
            q[:, :, first:last], k, scale=scale, attn_mask=part if attn_mask is None else part & attn_mask
        )

    return weights


def plain_places(model: nn.Module, images: Tensor) -> Places:
    """Return places in a transformer with one window: prefix tokens, then the map, row by row."""

    def find(q: Tensor) -> tuple[tuple[int, int], Tensor]:
        tokens, prefix = q.shape[2], int(getattr(model, "num_prefix_tokens", 0))
        embed: Any = getattr(model, "patch_embed", None)
        size = embed.dynamic_feat_size(images.shape[-2:]) if hasattr(embed, "dynamic_feat_size") else (0, 0)
        if prefix + size[0] * size[1] != tokens:
            size = (isqrt(tokens - prefix),) * 2
        if prefix + size[0] * size[1] != tokens:
            raise ValueError(f"{tokens} tokens of {type(model).__name__} do not make a map: their places are unknown")
        places = torch.arange(size[0] * size[1], device=q.device)
        return (size[0], size[1]), F.pad(places, (prefix, 0), value=PREFIX).unsqueeze(0)

    return find


def size_hook(sizes: dict[str, tuple[int, int]]) -> Callable[..., None]:
    """Return a hook that records the size of the map (batch, H, W, channels) that a Swin block gets."""

    def hook(block: nn.Module, args: Any) -> None:
        sizes["map"] = (args[0].shape[1], args[0].shape[2])

    return hook


def swin_places(block: nn.Module, sizes: dict[str, tuple[int, int]]) -> Places:
    """Return places in the windows of timm's Swin, which rolls the map before it pads it."""
    attention = cast(Any, block)

    def find(q: Tensor) -> tuple[tuple[int, int], Tensor]:
        height, width = size = sizes["map"]
        (high, wide), (up, left) = attention.window_size, attention.shift_size
        places = torch.arange(height * width, device=q.device).view(height, width)
        places = torch.roll(places, shifts=(-up, -left), dims=(0, 1))
        places = F.pad(places, (0, -width % wide, 0, -height % high), value=PADDING)
        places = places.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).transpose(1, 2)
        return size, places.reshape(-1, high * wide)

    return find
