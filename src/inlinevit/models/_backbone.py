"""What the four families share: stages of blocks, the contract of timm's models, attention by stage as words."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import global_pool_nlc, register_notrace_function, to_2tuple, trunc_normal_
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ..layers import ATTENTIONS, Block, PositionEmbedding, SquareWindows, TokenMixer, WholeMap
from ._checkpoint import load_checkpoint

# A stage's attention: a word for all its blocks, or words for its first blocks, of which the last word goes on.
StageAttention = str | Sequence[str]


def attention_by_stage(attention: str | Sequence[StageAttention], depths: Sequence[int]) -> list[list[str]]:
    """Spell out the attention of every block.

    Args:
        attention: One word for the whole model, or an entry a stage: a word, or a tuple of words for the stage's
            first blocks, the last of which goes on to the end: ("inline", "inline", ("inline", "softmax"), "softmax").
        depths: Blocks of each stage.

    Returns:
        A list of words for each stage, a word for each block.
    """
    stages = [attention] * len(depths) if isinstance(attention, str) else list(attention)
    if len(stages) != len(depths):
        raise ValueError(f"attention names {len(stages)} stages, but the model has {len(depths)}: {attention!r}")
    spelled = []
    for words, depth in zip(stages, depths, strict=True):
        first = [words] if isinstance(words, str) else list(words)
        for word in first:
            if word not in ATTENTIONS:
                raise ValueError(f"unknown attention {word!r}: choose one of {', '.join(sorted(ATTENTIONS))}")
        if not 1 <= len(first) <= depth:
            raise ValueError(f"a stage of {depth} blocks takes 1 to {depth} attention words, not {len(first)}")
        spelled.append(first + first[-1:] * (depth - len(first)))
    return spelled


def make_blocks(
    make_attention: Callable[[type[TokenMixer], int], TokenMixer],
    words: Sequence[str],
    drop_paths: Sequence[float],
    dim: int,
    **options: Any,
) -> list[Block]:
    """The blocks of a stage.

    Args:
        make_attention: From the kind of attention and the block's place in its stage to the attention.
        words: The attention of each block.
        drop_paths: Stochastic depth of each block.
        dim: Channels.
        **options: Those of Block.
    """
    return [
        Block(make_attention(ATTENTIONS[word], i), dim, drop_path=drop_path, **options)
        for i, (word, drop_path) in enumerate(zip(words, drop_paths, strict=True))
    ]


def square_windows(window_size: int | None, block: int) -> nn.Module:
    """Windows that shift in every second block, or the whole map if no size is given."""
    return WholeMap() if window_size is None else SquareWindows(window_size, shifted=block % 2 == 1)


@register_notrace_function
def as_image(x: Tensor, in_chans: int) -> Tensor:
    """x, if it is a batch of images (batch, in_chans, H, W) in floating point."""
    if x.dim() != 4 or x.shape[1] != in_chans:
        raise ValueError(f"expected images of shape (batch, {in_chans}, height, width), but got {x.shape}")
    if not x.is_floating_point():
        raise ValueError(f"expected floating-point images, but got {x.dtype}: convert and normalise them first")
    return x


class Stage(nn.Module):
    """An embedding of the map before, and blocks that keep its size.

    Args:
        embed: (batch, channels, H', W') to (batch, H, W, dim).
        blocks: The blocks.
        positions: Learned positions, if the stage has any.
        class_token: Whether a learned token goes before the map.
    """

    def __init__(
        self,
        embed: nn.Module,
        blocks: Sequence[nn.Module],
        *,
        dim: int,
        positions: PositionEmbedding | None = None,
        class_token: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_prefix_tokens = 1 if class_token else 0
        self.grad_checkpointing = False
        self.embed = embed
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim, device=device, dtype=dtype)) if class_token else None
        self.positions = positions
        self.blocks = nn.ModuleList(blocks)

    def embed_tokens(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """The tokens before the first block, (batch, prefix + H·W, dim), and (H, W)."""
        x = self.embed(x)
        batch, height, width, dim = x.shape
        x = x.reshape(batch, height * width, dim)
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(batch, -1, -1), x], dim=1)
        if self.positions is not None:
            x = self.positions(x, (height, width))
        return x, (height, width)

    def forward_tokens(
        self, x: Tensor, take: list[int], last: int | None = None
    ) -> tuple[Tensor, tuple[int, int], list[Tensor]]:
        """Run the blocks, all of them or up to the last one asked for.

        Returns:
            Tokens (batch, prefix + H·W, dim), (H, W), and the tokens after each block to take.
        """
        x, size = self.embed_tokens(x)
        taken: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            # No break: TorchScript unrolls this loop.
            if last is None or i <= last:
                if self.grad_checkpointing and not torch.jit.is_scripting():
                    x = checkpoint(block, x, size)
                else:
                    x = block(x, size)
                if i in take:
                    taken.append(x)
        return x, size, taken

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, H', W') to (batch, dim, H, W), or with a class token to (batch, 1 + H·W, dim)."""
        x, size, _ = self.forward_tokens(x, [])
        return x if self.num_prefix_tokens > 0 else tokens_to_map(x, size, 0)


def tokens_to_map(x: Tensor, size: tuple[int, int], num_prefix_tokens: int) -> Tensor:
    """(batch, prefix + H·W, dim) to (batch, dim, H, W); a view."""
    return x[:, num_prefix_tokens:].unflatten(1, size).permute(0, 3, 1, 2)


class Backbone(nn.Module):
    """Stages, a norm and a head, behaving as timm's models do.

    Args:
        stages: The stages, from fine to coarse.
        norm: The norm of the last stage's tokens.
        dims: Channels of each stage.
        reductions: Pixels for each token of each stage, along an axis.
        num_classes: Width of the head; 0 = none.
        in_chans: Channels of the images.
        global_pool: "avg" over the map, "token" for the class token, or "" for none.
        drop_rate: Dropout before the head.
    """

    # From published names to ours: (regular expression, replacement), all applied in turn. Several published parameters
    # may be parts of one of ours; their names then end in #0, #1, ….
    published_names: tuple[tuple[str, str], ...] = ()

    def __init__(
        self,
        stages: Sequence[Stage],
        norm: nn.Module,
        *,
        dims: Sequence[int],
        reductions: Sequence[int],
        num_classes: int,
        in_chans: int,
        global_pool: str,
        drop_rate: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.num_features = self.head_hidden_size = dims[-1]
        self.num_prefix_tokens = stages[-1].num_prefix_tokens
        if self.num_prefix_tokens > 0:
            self.output_fmt = "NLC"
        self.feature_info = [
            {"num_chs": dim, "reduction": reduction, "module": f"stages.{i}"}
            for i, (dim, reduction) in enumerate(zip(dims, reductions, strict=True))
        ]
        self.stages = nn.Sequential(*stages)
        self.norm = norm
        self.head_drop = nn.Dropout(drop_rate)
        self.global_pool = self._check_pool(global_pool)
        self.head = nn.Linear(dims[-1], num_classes, device=device, dtype=dtype) if num_classes > 0 else nn.Identity()
        self.init_weights()

    @torch.jit.ignore
    def init_weights(self) -> None:
        """Draw linear layers and class token from a truncated normal; the rest keeps its own initial values."""
        for name, parameter in self.named_parameters():
            if name.endswith("class_token"):
                trunc_normal_(parameter, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    @torch.jit.ignore
    def load_pretrained(self, checkpoint_path: str, prefix: str = "") -> None:
        """timm's hook for weights in a form of our own: read them safely, under published names or ours."""
        load_checkpoint(self, checkpoint_path)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Parameters with more than one dimension that are not to decay (timm leaves out vectors by itself)."""
        suffixes = ("class_token", "positions.table", "relative_position_bias_table")
        return {name for name, _ in self.named_parameters() if name.endswith(suffixes)}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layers for layer-wise learning rates: the first embedding, then a layer a block (or a stage, if coarse)."""
        return {
            "stem": r"^stages\.0\.(?:embed|positions|class_token)",
            "blocks": r"^stages\.(\d+)"
            if coarse
            else [
                (r"^stages\.(\d+)\.(?:embed|positions|class_token)", (0,)),
                (r"^stages\.(\d+)\.blocks\.(\d+)", None),
                (r"^norm", (99999,)),
            ],
        }

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass instead of keeping their activations."""
        for stage in self.stages:
            stage.grad_checkpointing = enable

    @torch.jit.ignore
    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Keep learned positions for another input size from now on. Inputs of any size work without this, too."""
        height, width = to_2tuple(img_size)
        for stage, info in zip(self.stages, self.feature_info, strict=True):
            if stage.positions is not None:
                stage.positions.set_grid(grid_of((height, width), info["reduction"]))

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    @torch.jit.ignore
    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Give the model a new head (0 = none), and another pooling if one is named."""
        self.num_classes = num_classes
        if global_pool is not None:
            self.global_pool = self._check_pool(global_pool)
        like = next(self.parameters())
        head = nn.Linear(self.num_features, num_classes, device=like.device, dtype=like.dtype)
        self.head = (head if num_classes > 0 else nn.Identity()).train(self.training)

    def _check_pool(self, global_pool: str) -> str:
        known = ("avg", "token", "") if self.num_prefix_tokens > 0 else ("avg", "")
        if global_pool not in known:
            raise ValueError(f"unknown global_pool {global_pool!r} for this model: choose one of {known}")
        return global_pool

    def normalize(self, x: Tensor) -> Tensor:
        """The norm of the last stage's output, a map (batch, dim, H, W) or tokens (batch, prefix + H·W, dim)."""
        return self.norm(x) if self.num_prefix_tokens > 0 else self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (batch, in_chans, H, W) to the last map (batch, dim, H', W'), or to tokens if there is a class token."""
        return self.normalize(self.stages(as_image(x, self.in_chans)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features to logits (batch, num_classes), or to what goes into the head."""
        if self.num_prefix_tokens > 0:
            x = global_pool_nlc(x, self.global_pool, self.num_prefix_tokens)
        elif self.global_pool == "avg":
            x = x.mean(dim=(2, 3))
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, in_chans, H, W) to logits (batch, num_classes)."""
        return self.forward_head(self.forward_features(x))

    @torch.jit.ignore
    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The maps of the levels in feature_info: those after the stages, or in a plain transformer after the blocks.

        Args:
            x: Images (batch, in_chans, H, W).
            indices: Which levels: the last n, a list, or all.
            norm: Apply the last norm to the maps that it fits.
            stop_early: Leave out what comes after the last level asked for.
            output_fmt: "NCHW", or "NLC" for the map's tokens.
            intermediates_only: Return the maps alone, not the features too.

        Returns:
            The maps, or (features, maps).
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"unknown output_fmt {output_fmt!r}: choose NCHW or NLC")
        take, last = feature_take_indices(len(self.feature_info), indices)
        x, maps = self.forward_levels(as_image(x, self.in_chans), take, last if stop_early else None, norm)
        if output_fmt == "NLC":
            maps = [level.flatten(2).transpose(1, 2) for level in maps]
        return maps if intermediates_only else (x, maps)

    @torch.jit.ignore
    def forward_levels(self, x: Tensor, take: list[int], last: int | None, norm: bool) -> tuple[Tensor, list[Tensor]]:
        """Features and the maps to take, (batch, dim, H, W); nothing is computed after the last level, if one is given."""
        maps = []
        stages = self.stages if last is None else self.stages[: last + 1]
        for i, stage in enumerate(stages):
            tokens, size, _ = stage.forward_tokens(x, [])
            normed = self.norm(tokens) if i == len(self.stages) - 1 else tokens
            if i in take:
                maps.append(tokens_to_map(normed if norm else tokens, size, stage.num_prefix_tokens))
            x = normed if stage.num_prefix_tokens > 0 else tokens_to_map(normed, size, 0)
        return x, maps

    @torch.jit.ignore
    def keep_levels(self, count: int) -> None:
        """Drop the levels after the first `count`."""
        self.stages = self.stages[:count]

    @torch.jit.ignore
    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the maps of these levels do not need; returns the indices of the levels."""
        take, last = feature_take_indices(len(self.feature_info), indices)
        self.keep_levels(last + 1)
        self.feature_info = self.feature_info[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take


def grid_of(img_size: tuple[int, int], reduction: int) -> tuple[int, int]:
    """(H, W) of the map on which a token stands for reduction × reduction pixels."""
    return -(-img_size[0] // reduction), -(-img_size[1] // reduction)


def default_cfg(name: str = "", file_id: str = "", size: int = 224, **overrides: Any) -> dict[str, Any]:
    """What timm wants to know of a model's weights and data.

    Args:
        name: The model's name, which the downloaded file gets.
        file_id: Where the published weights lie; "" if there are none.
        size: Side of the images that the model is made for.
        **overrides: Entries that differ.
    """
    return {
        "url": (f"https://cloud.tsinghua.edu.cn/f/{file_id}/?dl=1", f"{name}.pth") if file_id else None,
        # Our own loader, which refuses files that could run code.
        "custom_load": True,
        "num_classes": 1000,
        "input_size": (3, size, size),
        "pool_size": (size // 32, size // 32),
        "crop_pct": 1.0 if size == 384 else 224 / 256,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "stages.0.embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
        "paper_ids": "arXiv:2412.06590",
        **overrides,
    }
