"""Looking inside models: every layer of attention of a forward pass, one after the other.

Our own layers say themselves what they compute with (`TokenMixer.shares`, `TokenMixer.rows`). Those of timm call
torch's `scaled_dot_product_attention`: each is called once more, apart from the model, and what it passes there is
noted.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isqrt
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..layers import ATTENTIONS, TokenMixer
from ..layers.layouts import Windows, covers_map, window_partition, window_reverse
from ..layers.token_mixer import Share
from ..ops import softmax_weights
from .layer import PADDING, PREFIX, Convolution, Layer, See

# What is done with a layer: its output (batch · windows, heads, tokens, width) in place of the layer's own, or None.
Visit = Callable[[Layer], Tensor | None]


@torch.no_grad()
def watch(model: nn.Module, images: Tensor, visit: Callable[[Layer], Any]) -> Tensor:
    """Run a model, and show each layer of attention when its turn comes. Nothing of a layer is kept after its visit.

    Args:
        model: A model of ours or any ViT, DeiT or Swin of timm's, in evaluation mode.
        images: (batch, channels, H, W).
        visit: Called with each layer, in order.

    Returns:
        What the model answers, as if nobody had looked.
    """

    def look(layer: Layer) -> None:
        visit(layer)

    with visited(model, images, look):
        return model(images)


@torch.no_grad()
def run_masked(model: nn.Module, images: Tensor, see: See) -> Tensor:
    """Run a model whose queries may not see all tokens, in every layer.

    Attention is as if what a query may not see were not there; convolutions that the layer adds do not see it, either.

    Args:
        model: See watch.
        images: (batch, channels, H, W).
        see: Which tokens queries may see.

    Returns:
        What the model answers.
    """
    with visited(model, images, lambda layer: layer.output(see)):
        return model(images)


@contextmanager
def visited(model: nn.Module, images: Tensor, visit: Visit) -> Iterator[None]:
    """A context in which the layers of a model are visited while it runs on these images."""
    model = getattr(model, "_orig_mod", model)
    if model.training:
        raise ValueError("the model is in training mode, where attention is drawn by lot: call model.eval() first")
    hooks = []
    found = False
    for name, module in model.named_modules():
        if isinstance(module, TokenMixer):
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
                f"{type(model).__name__} has no attention that can be looked into: use a model of this library, or a "
                "ViT, DeiT or Swin of timm's"
            )
        yield
    finally:
        for handle in hooks:
            handle.remove()


def own_hook(name: str, visit: Visit) -> Callable[..., Tensor | None]:
    """A forward hook for a TokenMixer."""

    def hook(mixer: TokenMixer, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
        x, size, context, prefix_only = token_mixer_arguments(*args, **kwargs)
        outputs = []
        for share in mixer.shares(x, size, context):
            layer = layer_of_share(name, mixer, share)
            replaced = visit(layer)
            if replaced is not None:
                joined = replaced.transpose(1, 2).flatten(2)
                outputs.append(joined if not layer.sees_map else window_reverse(joined, share.windows))
        if not outputs:
            return None
        out = torch.cat(outputs, dim=-1).to(output.dtype)
        return mixer.proj_drop(mixer.proj(out[:, : output.shape[1]] if prefix_only else out))

    return hook


def token_mixer_arguments(
    x: Tensor, size: tuple[int, int], context: Tensor | None = None, prefix_only: bool = False
) -> tuple[Tensor, tuple[int, int], Tensor, bool]:
    """The arguments of TokenMixer.forward, however they were passed."""
    return x, size, x if context is None else context, prefix_only


def layer_of_share(name: str, mixer: TokenMixer, share: Share) -> Layer:
    """What a TokenMixer does with one share of its heads."""
    windows, heads = share.windows, share.q.shape[1]

    def rows(first: int, last: int, seen: Tensor | None) -> Tensor:
        return mixer.rows(share.q[:, :, first:last], share.k, share.v, windows, seen, first)

    convolution = None
    if share.kernels is not None:
        bias = None if share.bias is None else share.bias.unflatten(0, (heads, -1))
        kernels = share.kernels.unflatten(1, (heads, -1))
        convolution = Convolution(kernels, bias, (windows.height, windows.width))
    return Layer(
        name if windows.shares == 1 else f"{name} ({windows.share + 1} of {windows.shares})",
        next(word for word, kind in ATTENTIONS.items() if type(mixer) is kind),
        (windows.map_height, windows.map_width),
        share.q,
        share.k,
        share.v,
        places_in_windows(windows, share.q.shape[2], share.q.device),
        share.k.shape[2] == share.q.shape[2],
        rows,
        convolution,
    )


def places_in_windows(windows: Windows, tokens: int, device: torch.device) -> Tensor:
    """See Layer.places."""
    places = torch.arange(windows.map_height * windows.map_width, device=device)
    if covers_map(windows):
        return F.pad(places, (tokens - len(places), 0), value=PREFIX).unsqueeze(0)
    # Cutting pads with zeros: count from 1.
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
    """A forward hook for an attention of timm's."""

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
                raise ValueError(f"{name} ({type(module).__name__}) is no plain softmax attention: it cannot be shown")
            # Attention that pools has queries of its own, which are no tokens of the image.
            if q.shape[2] == k.shape[2]:
                size, places = find_places(q)
                layer = Layer(name, "softmax", size, q, k, v, places, True, softmax_rows(q, k, attn_mask, scale))
                replaced = visit(layer)
                if replaced is not None:
                    replacements.append(replaced)
                    return replaced
            return F.scaled_dot_product_attention(q, k, v, attn_mask, scale=scale)

        # Once more, apart from the model: the hooked call itself stays as it is.
        with fused(module), Intercept(attend):
            again = cast(Any, type(module)).forward(module, *args, **kwargs)
        return again if replacements else None

    return hook


@contextmanager
def fused(module: nn.Module) -> Iterator[None]:
    """A context in which an attention of timm's calls scaled_dot_product_attention."""
    attention = cast(Any, module)
    before, attention.fused_attn = attention.fused_attn, True
    try:
        yield
    finally:
        attention.fused_attn = before


def softmax_rows(q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None) -> Callable[..., Tensor]:
    """See Layer.make_rows; mask is that of scaled_dot_product_attention."""

    def rows(first: int, last: int, seen: Tensor | None) -> Tensor:
        part = mask if mask is None or mask.shape[-2] == 1 else mask[..., first:last, :]
        if part is None or part.dtype != torch.bool:
            return softmax_weights(q[:, :, first:last], k, scale=scale, bias=part, seen=seen)
        return softmax_weights(q[:, :, first:last], k, scale=scale, seen=part if seen is None else part & seen)

    return rows


def plain_places(model: nn.Module, images: Tensor) -> Places:
    """Places in a transformer that has one window: tokens before the map, then the map, row by row."""

    def find(q: Tensor) -> tuple[tuple[int, int], Tensor]:
        tokens, prefix = q.shape[2], int(getattr(model, "num_prefix_tokens", 0))
        embed: Any = getattr(model, "patch_embed", None)
        size = embed.dynamic_feat_size(images.shape[-2:]) if hasattr(embed, "dynamic_feat_size") else (0, 0)
        if prefix + size[0] * size[1] != tokens:
            size = (isqrt(tokens - prefix),) * 2
        if prefix + size[0] * size[1] != tokens:
            raise ValueError(f"{tokens} tokens of {type(model).__name__} do not make a map: their places are not known")
        places = torch.arange(size[0] * size[1], device=q.device)
        return (size[0], size[1]), F.pad(places, (prefix, 0), value=PREFIX).unsqueeze(0)

    return find


def size_hook(sizes: dict[str, tuple[int, int]]) -> Callable[..., None]:
    """A hook that notes the size of the map that a block of Swin's is given, (batch, H, W, channels)."""

    def hook(block: nn.Module, args: Any) -> None:
        sizes["map"] = (args[0].shape[1], args[0].shape[2])

    return hook


def swin_places(block: nn.Module, sizes: dict[str, tuple[int, int]]) -> Places:
    """Places in the windows of timm's Swin, which rolls the map before it pads it."""
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
