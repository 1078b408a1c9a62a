"""InLine attention in other models: replace the attention of their blocks."""

import logging
import warnings
from collections.abc import Callable, Iterable
from copy import deepcopy
from inspect import Parameter, signature
from typing import Any

import torch
from timm.layers import PatchDropout, to_2tuple, trunc_normal_
from timm.models.naflexvit import NaFlexVit
from torch import Tensor, nn

from ..layers import AttentionAdapter, BaseAttention, PatchGrid, SoftmaxAttention
from ..layers.registry import find_attention
from ..layers.surroundings import BLOCK_SURROUNDINGS
from ..utils.validation import require
from ._inline_vit import check_attn_kwargs

_logger = logging.getLogger(__name__)

# Which blocks: indices, names, or a function of the name and the block.
Blocks = Iterable[int | str] | Callable[[str, nn.Module], bool]
# Arguments of attention that cannot be ignored, and what they are.
REFUSED_ARGUMENTS = {
    "rope": "rotary position embeddings",
    "shared_rel_pos": "a relative position bias",
    "shared_rel_pos_bias": "a relative position bias",
}
LEAVE_OUT = "leave the block out with blocks=…"
PREFIX_TOKENS = ("cls_token", "dist_token", "reg_token", "register_tokens")


def replace_attention(
    model: nn.Module,
    attention: str = "inline",
    blocks: Blocks | None = None,
    keep_weights: bool = True,
    **attn_kwargs: Any,
) -> nn.Module:
    """Replace the attention in the blocks of a ViT, DeiT or Swin of timm, or of a similar model, in place.

    A block is a module with a child `attn`, which has linear layers `qkv` and `proj`, and `num_heads`. Its attention
    becomes an AttentionAdapter. Either all chosen blocks are changed or, if there is an error, none.

    Args:
        model: The model, which is changed.
        attention: The new attention, one of inlinevit.list_attentions().
        blocks: The blocks to change: indices in the order of the model (negative ones count from the end), names such
            as "blocks.3", or a function that is called with the name and the block. All by default.
        keep_weights: Keep `qkv` and `proj`, which must be those of plain softmax attention; otherwise they are
            initialised as in the models of this library. Other parameters of the new attention always are.
        **attn_kwargs: Arguments of the attention, such as feature_map="relu", local_residual=False, or what surrounds
            it: gate, lepe and rope (see Surroundings). In windows of Swin, places are those in the window.

    Returns:
        The model.
    """
    if find_attention(attention).wants_dwconv_mlp:
        raise ValueError(
            f"{attention} attention needs convolutions in the MLPs, which are not replaced: use 'linear' for its "
            f"attention alone, or create a model of this library with attention={attention!r}"
        )
    check_attn_kwargs(attn_kwargs, [attention])
    for name in BLOCK_SURROUNDINGS:
        if attn_kwargs.pop(name, getattr(find_attention(attention).surroundings, name)):
            raise ValueError(
                f"{name} is a part of the block, which is not replaced: use {name}=False, or create a model of this "
                f"library with attention={attention!r}"
            )
    if isinstance(model, NaFlexVit):
        raise ValueError(
            "NaFlexVit packs maps of several sizes into one batch, where attention does not know their sizes: use a "
            "VisionTransformer with dynamic_img_size=True"
        )
    chosen = choose_blocks(model, blocks)
    grids = {
        id(module.feat_size.patch_embed): module.feat_size
        for module in model.modules()
        if isinstance(module, AttentionAdapter) and isinstance(module.feat_size, PatchGrid)
    }
    sources = [Source(model, name, block) for name, block in chosen.items()]
    for source in sources:
        source.check(attention, keep_weights)
    loses_positions = [keep_weights and attention != "softmax" and source.table is not None for source in sources]
    made = [source.make_attention(attention, keep_weights, attn_kwargs) for source in sources]
    for source, new, block in zip(sources, made, chosen.values(), strict=True):
        block.attn = AttentionAdapter(new, source.feat_size(grids))
    _logger.info("%s attention in %d blocks: %s", attention, len(chosen), ", ".join(chosen))
    if any(loses_positions):
        warnings.warn(
            f"the relative position biases of {sum(loses_positions)} blocks are dropped: {attention} attention has "
            "none",
            stacklevel=2,
        )
    return model


def choose_blocks(model: nn.Module, blocks: Blocks | None) -> dict[str, Any]:
    """Return the blocks to change, by name; see replace_attention."""
    found = {
        name: module for name, module in model.named_modules() if isinstance(getattr(module, "attn", None), nn.Module)
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no block with a child 'attn': use a ViT, DeiT or Swin of timm, or assign an "
            "inlinevit.layers.AttentionAdapter to the attention of your block"
        )
    names = list(found)
    if blocks is None:
        return found
    if callable(blocks):
        chosen = {name for name in names if blocks(name, found[name])}
    else:
        require(not isinstance(blocks, str), f"blocks is {blocks!r}: it should be a list of names, [{blocks!r}]")
        chosen = set()
        for block in blocks:
            if isinstance(block, str):
                require(block in found, f"there is no block {block!r}: choose from {names[0]} to {names[-1]}")
                chosen.add(block)
            else:
                is_index = isinstance(block, int) and not isinstance(block, bool) and -len(names) <= block < len(names)
                require(
                    is_index, f"there is no block {block!r}: the model has {len(names)}, from 0 to {len(names) - 1}"
                )
                chosen.add(names[block])
    require(len(chosen) > 0, f"blocks chooses none of the {len(names)} blocks, {names[0]} to {names[-1]}")
    return {name: found[name] for name in names if name in chosen}


class Source:
    """The attention of a block that is to be replaced.

    Args:
        model: The model.
        name: The name of the block in the model.
        block: The block.
    """

    def __init__(self, model: nn.Module, name: str, block: Any) -> None:
        self.attn: Any = block.attn
        self.label = f"{name}.attn ({type(block.attn).__name__})".removeprefix(".")
        # The modules around the attention, from the block to the model.
        parts = name.split(".") if name else []
        paths = [".".join(parts[:length]) for length in range(len(parts), -1, -1)]
        self.parents: list[Any] = [model.get_submodule(path) for path in paths]
        embeds = [getattr(parent, "patch_embed", None) for parent in self.parents]
        self.patch_embed = next((embed for embed in embeds if isinstance(embed, nn.Module)), None)
        window_size = getattr(self.attn, "window_size", None)
        self.window_size: tuple[int, int] | None = to_2tuple(window_size) if window_size else None
        # Swin's biases of relative positions.
        self.table: nn.Parameter | None = None
        table = getattr(self.attn, "relative_position_bias_table", None)
        if table is not None and self.window_size is not None:
            height, width = self.window_size
            if table.shape == ((2 * height - 1) * (2 * width - 1), self.attn.num_heads):
                self.table = table

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the map."""
        if self.window_size is not None:
            return 0
        for parent in self.parents:
            if isinstance(getattr(parent, "num_prefix_tokens", None), int):
                return parent.num_prefix_tokens
        tokens = [getattr(parent, name, None) for parent in self.parents for name in PREFIX_TOKENS]
        return sum(token.shape[1] for token in tokens if isinstance(token, Tensor) and token.dim() == 3)

    def feat_size(self, grids: dict[int, PatchGrid]) -> tuple[int, int] | PatchGrid | None:
        """Return the feat_size of its adapter.

        Args:
            grids: The grids of the patch embeddings of the model, by id, to which a new one is added.
        """
        if self.window_size is not None or self.patch_embed is None:
            return self.window_size
        if id(self.patch_embed) not in grids:
            grids[id(self.patch_embed)] = PatchGrid(self.patch_embed)
        return grids[id(self.patch_embed)]

    def check(self, attention: str, keep_weights: bool) -> None:
        """Raise ValueError if it cannot be replaced by this attention; see replace_attention."""
        self.check_arguments()
        self.check_layers()
        remedy = f"use keep_weights=False for a new attention, or {LEAVE_OUT}"
        kept = ("qkv.", "proj.", *(["relative_position_bias_table"] if self.table is not None else []))
        others = [name for name, _ in self.attn.named_parameters() if not name.startswith(kept)]
        if keep_weights and others:
            raise ValueError(
                f"the weights of {self.label} cannot be kept, since {attention} attention has no {', '.join(others)}: "
                f"{remedy}"
            )
        # Without values, there is nothing to compare.
        if not self.attn.qkv.weight.is_meta and not self.is_softmax() and keep_weights:
            raise ValueError(
                f"the weights of {self.label} cannot be kept, since it does not compute plain softmax attention: "
                f"{remedy}"
            )

    def check_arguments(self) -> None:
        """Refuse attention with arguments that ours does not take."""
        if isinstance(self.attn, AttentionAdapter):
            raise ValueError(f"{self.label} was replaced before: start from a new copy of the model, or {LEAVE_OUT}")
        if isinstance(self.attn, BaseAttention):
            raise ValueError(
                f"{self.label} is attention of this library: choose it when you create the model, as in "
                "timm.create_model('inline_deit_tiny', attention='softmax')"
            )
        for argument in list(signature(self.attn.forward).parameters.values())[1:]:
            if argument.name in REFUSED_ARGUMENTS:
                meaning = REFUSED_ARGUMENTS[argument.name]
                raise ValueError(f"{self.label} takes {meaning}, which would be lost: {LEAVE_OUT}")
            if argument.default is Parameter.empty and argument.kind is Parameter.POSITIONAL_OR_KEYWORD:
                raise ValueError(
                    f"{self.label} takes {argument.name!r}, which attention of this library does not take: {LEAVE_OUT}"
                )

    def check_layers(self) -> None:
        """Refuse layers and options that our attention does not have."""
        qkv, proj, num_heads = (getattr(self.attn, name, None) for name in ("qkv", "proj", "num_heads"))
        if not (isinstance(qkv, nn.Linear) and isinstance(proj, nn.Linear) and isinstance(num_heads, int)):
            raise ValueError(
                f"{self.label} does not have linear layers qkv and proj, and num_heads; separate projections of "
                f"queries, keys and values are not supported: {LEAVE_OUT}"
            )
        dim = qkv.in_features
        if qkv.out_features != 3 * dim or (proj.in_features, proj.out_features) != (dim, dim) or dim % num_heads != 0:
            raise ValueError(
                f"{self.label} maps {dim} channels to {qkv.out_features} of queries, keys and values and then to "
                f"{proj.out_features}, but ours has heads of dim / num_heads channels: {LEAVE_OUT}"
            )
        if getattr(getattr(self.attn, "attn_drop", None), "p", 0.0) > 0:
            raise ValueError(
                f"{self.label} has dropout of attention weights, which attention of this library does not have: "
                "create the model with attn_drop_rate=0"
            )
        for parent in self.parents:
            drop = getattr(parent, "patch_drop", None)
            if isinstance(drop, PatchDropout) and drop.prob > 0:
                raise ValueError(
                    "the model drops patches in training, which leaves no map: create it with patch_drop_rate=0"
                )

    def is_softmax(self) -> bool:
        """Return whether it computes softmax attention; refuse attention for tokens of another shape."""
        qkv = self.attn.qkv
        height, width = self.window_size or (4, 4)
        generator = torch.Generator().manual_seed(0)
        shape = (1, self.num_prefix_tokens + height * width, qkv.in_features)
        tokens = torch.randn(shape, generator=generator).to(qkv.weight)
        same = AttentionAdapter(self.make_attention("softmax", True, {}), (height, width))
        with torch.no_grad():
            q, k, _ = qkv(tokens).float().chunk(3, dim=-1)
            # Scores that are almost equal would not show how they are computed.
            scores = (q @ k.transpose(1, 2) * qkv.in_features**-0.5).std()
            tokens = tokens / scores.clamp(min=1e-6).sqrt().to(tokens.dtype)
            try:
                # Copies, so that modes and hooks of the model stay as they are.
                expected = deepcopy(self.attn).eval()(tokens)
                fits = expected.shape == tokens.shape
            except Exception as error:
                raise ValueError(
                    f"{self.label} does not take tokens (batch, tokens, channels), but fails ({error}): {LEAVE_OUT}"
                ) from error
            if not fits:
                raise ValueError(
                    f"{self.label} does not map tokens (batch, tokens, channels) to the same shape: {LEAVE_OUT}"
                )
            difference = (deepcopy(same).eval()(tokens) - expected).float().norm()
        tolerance = 1e-3 if tokens.dtype in (torch.float32, torch.float64) else 5e-2
        return bool(difference <= tolerance * expected.float().norm())

    def make_attention(self, attention: str, keep_weights: bool, attn_kwargs: dict[str, Any]) -> BaseAttention:
        """Return the new attention."""
        kind, qkv, proj = find_attention(attention), self.attn.qkv, self.attn.proj
        options: dict[str, Any] = {"num_prefix_tokens": self.num_prefix_tokens, **attn_kwargs}
        grid = self.window_size or getattr(self.patch_embed, "grid_size", None)
        if kind.learns_grid and grid is not None:
            options["grid"] = tuple(grid)
        if kind is SoftmaxAttention and self.window_size is not None and (self.table is not None or not keep_weights):
            options["relative_window"] = max(self.window_size)
        new = kind(
            qkv.in_features,
            self.attn.num_heads,
            qkv_bias=qkv.bias is not None,
            device=qkv.weight.device,
            dtype=qkv.weight.dtype,
            **options,
        ).train(self.attn.training)
        if keep_weights:
            if (new.qkv.weight.shape, new.proj.weight.shape) != (qkv.weight.shape, proj.weight.shape):
                raise ValueError(
                    f"the weights of {self.label} cannot be kept, since {attention} attention has other projections, "
                    f"with {new.qkv.out_features} channels: use keep_weights=False for a new attention, or {LEAVE_OUT}"
                )
            new.qkv, new.proj = qkv, proj
            if isinstance(new, SoftmaxAttention) and self.table is not None and self.window_size is not None:
                new.relative_position_bias_table = square_table(self.table, self.window_size)
        else:
            if proj.bias is None:
                new.proj.register_parameter("bias", None)
            init_linear(new.qkv)
            init_linear(new.proj)
        if new.gate is not None:
            init_linear(new.gate)
        if isinstance(getattr(self.attn, "proj_drop", None), nn.Module):
            new.proj_drop = self.attn.proj_drop
        return new


def init_linear(layer: nn.Linear) -> None:
    """Initialise a linear layer as in the models of this library."""
    trunc_normal_(layer.weight, std=0.02)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def square_table(table: nn.Parameter, window_size: tuple[int, int]) -> nn.Parameter:
    """Return the relative position biases of a window as those of a square window, of which it is a part."""
    height, width = window_size
    if height == width:
        return table
    side = 2 * max(height, width) - 1
    square = table.new_zeros(side, side, table.shape[1])
    top, left = (side - (2 * height - 1)) // 2, (side - (2 * width - 1)) // 2
    with torch.no_grad():
        square[top : side - top, left : side - left] = table.view(2 * height - 1, 2 * width - 1, -1)
    return nn.Parameter(square.flatten(0, 1))
