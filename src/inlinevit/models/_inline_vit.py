"""The base class of all four families: stages of blocks, a norm and a head, with the interface of timm's models."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from timm.layers import (
    calculate_drop_path_rates,
    global_pool_nlc,
    register_notrace_function,
    to_2tuple,
    trunc_normal_,
)
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ..layers import AgentAttention, BaseAttention, Block, CrossStripes, ResamplePosEmbed, SquareWindows, WholeMap
from ..layers.registry import constructor_types, find_attention
from ..layers.surroundings import ATTENTION_SURROUNDINGS, SURROUNDINGS, check_lepe
from ..utils.validation import check_value
from ._arguments import MOST_CHANNELS, check_arguments, checked
from ._checkpoint import load_checkpoint

# The part of published_names that the families share.
LOCAL_RESIDUAL_NAMES = (
    (r"\.residual\.0\.", ".local_residual.fc1."),
    (r"\.residual\.2\.", ".local_residual.fc2."),
)


Layout = WholeMap | SquareWindows | CrossStripes
# The attention of a stage: one name for all blocks, or names for the first blocks, the last of which is repeated.
StageAttention = str | Sequence[str]


def attention_by_stage(attention: str | Sequence[StageAttention], depths: Sequence[int]) -> list[list[str]]:
    """Return the name of the attention of every block.

    Args:
        attention: One name for the whole model, or one entry per stage: a name, or a tuple of names for the first
            blocks of the stage, the last of which is repeated: ("inline", "inline", ("inline", "softmax"), "softmax").
        depths: Blocks of each stage.

    Returns:
        A list of names per stage, one for each block.
    """
    stages = [attention] * len(depths) if isinstance(attention, str) else list(attention)
    if len(stages) != len(depths):
        raise ValueError(f"attention names {len(stages)} stages, but the model has {len(depths)}: {attention!r}")
    names_by_stage = []
    for names, depth in zip(stages, depths, strict=True):
        first = [names] if isinstance(names, str) else list(names)
        for name in first:
            find_attention(name)
        if depth < 1:
            raise ValueError(f"every stage needs at least one block, but the depths are {tuple(depths)}")
        if not 1 <= len(first) <= depth:
            raise ValueError(f"a stage of {depth} blocks takes 1 to {depth} attention names, not {len(first)}")
        names_by_stage.append(first + first[-1:] * (depth - len(first)))
    return names_by_stage


class Stage(nn.Module):
    """Patch embedding (first stage) or downsampling (later stages), and blocks that keep the size of the map.

    Args:
        blocks: The blocks. A generator makes them after the embeddings, so that modules are initialised in the order
            of the forward pass.
        dim: Channels.
        patch_embed: For the first stage: images (batch, channels, H', W') to tokens (batch, H, W, dim).
        downsample: For later stages: the previous map (batch, channels, H', W') to tokens (batch, H, W, dim).
        resample_pos_embed: Resizes the learned positions, if the stage has any. If it has a prefix token, there is a
            learned class token before the map.
    """

    no_weight_decay_names = ("cls_token", "pos_embed")

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        *,
        dim: int,
        patch_embed: nn.Module | None = None,
        downsample: nn.Module | None = None,
        resample_pos_embed: ResamplePosEmbed | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_prefix_tokens = 0 if resample_pos_embed is None else resample_pos_embed.num_prefix_tokens
        self.grad_checkpointing = False
        self.patch_embed = patch_embed
        self.downsample = downsample
        self.cls_token: nn.Parameter | None = None
        if self.num_prefix_tokens > 0:
            self.cls_token = nn.Parameter(torch.empty(1, 1, dim, device=device, dtype=dtype))
        self.resample_pos_embed = resample_pos_embed
        self.pos_embed: nn.Parameter | None = None
        if resample_pos_embed is not None:
            pos_embed = torch.empty(1, resample_pos_embed.num_tokens, dim, device=device, dtype=dtype)
            self.pos_embed = nn.Parameter(pos_embed)
        self.reset_parameters()
        self.blocks = nn.ModuleList(blocks)

    def reset_parameters(self) -> None:
        """Initialise the class token and the positions; child modules have their own reset_parameters."""
        for parameter in (self.cls_token, self.pos_embed):
            if parameter is not None:
                trunc_normal_(parameter, std=0.02)

    def embed_tokens(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Return the tokens before the first block, (batch, prefix + H·W, dim), and (H, W)."""
        if self.patch_embed is not None:
            x = self.patch_embed(x)
        if self.downsample is not None:
            x = self.downsample(x)
        batch, height, width, dim = x.shape
        x = x.reshape(batch, height * width, dim)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(batch, -1, -1), x], dim=1)
        if self.resample_pos_embed is not None and self.pos_embed is not None:
            x = x + self.resample_pos_embed(self.pos_embed, (height, width))
        return x, (height, width)

    def forward_tokens(
        self, x: Tensor, take: Sequence[int] = (), last: int | None = None
    ) -> tuple[Tensor, tuple[int, int], list[Tensor]]:
        """Run the blocks.

        Args:
            x: The images, or the map of the stage before, (batch, channels, H', W').
            take: Blocks whose tokens are returned.
            last: The last block to run; all of them by default.

        Returns:
            Tokens (batch, prefix + H·W, dim), (H, W), and the tokens after each block to take.
        """
        x, feat_size = self.embed_tokens(x)
        x, taken = self.forward_blocks(x, feat_size, take, last)
        return x, feat_size, taken

    def forward_blocks(
        self, x: Tensor, feat_size: tuple[int, int], take: Sequence[int] = (), last: int | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the blocks on embedded tokens; see forward_tokens."""
        taken: list[Tensor] = []
        for i, block in enumerate(self.blocks if last is None else self.blocks[: last + 1]):
            x = checkpoint(block, x, feat_size) if self.grad_checkpointing else block(x, feat_size)
            if i in take:
                taken.append(x)
        return x, taken

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, H', W') to (batch, dim, H, W), or with a class token to (batch, 1 + H·W, dim)."""
        x, feat_size, _ = self.forward_tokens(x)
        return x if self.num_prefix_tokens > 0 else tokens_to_map(x, feat_size, 0)

    def set_grid(self, grid: tuple[int, int]) -> None:
        """Learn positions for another grid from now on, here and in attention that has learned the same grid."""
        if self.resample_pos_embed is None:
            return
        before = self.resample_pos_embed.grid
        for module in self.modules():
            # Attention may have positions of its own, for the map or for windows.
            resample = getattr(module, "resample_pos_embed", None)
            if isinstance(resample, ResamplePosEmbed) and resample.grid == before:
                module.pos_embed = resample.set_grid(cast(nn.Parameter, module.pos_embed), grid)
            elif isinstance(module, AgentAttention) and module.grid == before:
                module.set_grid(grid)


class InLineViT(nn.Module):
    """Stages, a norm and a head, with the interface of timm's models.

    The positional arguments are those of a family; the keyword arguments are the same for all families.

    Args:
        dims: Channels of each stage, from fine to coarse.
        depths: Blocks of each stage.
        mlp_ratios: Hidden width of the MLPs of each stage, as a multiple of the channels.
        reductions: Stride of each stage, in pixels per token.
        make_embed: Makes the patch embedding (stage 0) or downsampling of a stage, from the index of the stage, the
            channels of its input, and the arguments `device` and `dtype`.
        make_attention: Makes the attention of a block, from its class, the index of the stage, that of the block in the
            stage, and further arguments of the class.
        resample_pos_embeds: For learned positions: one for each stage. A stage with a prefix token has a class token.
        in_chans: Channels of the images.
        num_classes: Number of classes; 0 = no head.
        global_pool: "avg" over the map, "token" for the class token, if there is one, or "" for none.
        fc_norm: Whether the last norm comes after the pooling (`fc_norm`, as in timm), instead of before it (`norm`).
        qkv_bias: Whether q, k and v have a bias.
        attention: One name for all stages, or one entry per stage (see attention_by_stage).
        attn_kwargs: Arguments of the attention, such as {"feature_map": "relu", "local_residual": False}, and of what
            surrounds any attention: gate, lepe, rope, cpe and mlp_conv (see Surroundings).
        drop_rate: Dropout before the head.
        proj_drop_rate: Dropout in attention and MLPs.
        drop_path_rate: Stochastic depth of the last block; it increases from 0.
    """

    # From published names to ours: (regular expression, replacement), all applied in order. Several published
    # parameters may be parts of one of ours; their names then end in #0, #1, ….
    published_names: tuple[tuple[str, str], ...] = ()
    # The default levels of `features_only=True`.
    default_out_indices: int | tuple[int, ...] = (0, 1, 2, 3)
    # See Block.
    norm_eps = 1e-5
    kernels_before_norm = False

    @checked
    def __init__(
        self,
        dims: Sequence[int],
        depths: Sequence[int],
        mlp_ratios: Sequence[float],
        reductions: Sequence[int],
        make_embed: Callable[[int, int, dict[str, Any]], nn.Module],
        make_attention: Callable[[type[BaseAttention], int, int, dict[str, Any]], BaseAttention],
        resample_pos_embeds: Sequence[ResamplePosEmbed] | None = None,
        /,
        *,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        fc_norm: bool = False,
        qkv_bias: bool = True,
        attention: str | Sequence[StageAttention] = "inline",
        attn_kwargs: Mapping[str, Any] | None = None,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        names = attention_by_stage(attention, depths)
        check_dims(dims)
        attn_kwargs = {} if attn_kwargs is None else attn_kwargs
        check_attn_kwargs(attn_kwargs, [name for stage_names in names for name in stage_names])
        drop_paths = cast(list[list[float]], calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True))

        def make_block(stage: int, block: int) -> Block:
            kind = find_attention(names[stage][block])
            options = {
                "qkv_bias": qkv_bias,
                "proj_drop": proj_drop_rate,
                "num_prefix_tokens": resample_pos_embeds[stage].num_prefix_tokens if resample_pos_embeds else 0,
                **{
                    name: value
                    for name, value in attn_kwargs.items()
                    if name in kind.attn_kwargs_names or name in ATTENTION_SURROUNDINGS
                },
                **factory,
            }
            return Block(
                make_attention(kind, stage, block, options),
                dims[stage],
                mlp_ratio=mlp_ratios[stage],
                proj_drop=proj_drop_rate,
                drop_path=drop_paths[stage][block],
                norm_eps=self.norm_eps,
                kernels_before_norm=self.kernels_before_norm,
                dwconv_mlp=kind.wants_dwconv_mlp,
                cpe=attn_kwargs.get("cpe", kind.surroundings.cpe),
                mlp_conv=attn_kwargs.get("mlp_conv", kind.surroundings.mlp_conv),
                **factory,
            )

        stages = [
            Stage(
                (make_block(stage, block) for block in range(depths[stage])),
                dim=dim,
                patch_embed=make_embed(0, in_chans, factory) if stage == 0 else None,
                downsample=make_embed(stage, dims[stage - 1], factory) if stage > 0 else None,
                resample_pos_embed=resample_pos_embeds[stage] if resample_pos_embeds else None,
                **factory,
            )
            for stage, dim in enumerate(dims)
        ]
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
        self.reductions = list(reductions)
        self.stages = nn.Sequential(*stages)
        last_norm = cast(nn.Module, nn.LayerNorm(dims[-1], eps=self.norm_eps, **factory))
        self.norm = nn.Identity() if fc_norm else last_norm
        self.fc_norm = last_norm if fc_norm else nn.Identity()
        self.head_drop = nn.Dropout(drop_rate)
        self.global_pool = self._check_pool(global_pool)
        self.head = make_head(dims[-1], num_classes, **factory)
        self.init_weights(needs_reset=False)

    def stage_list(self) -> list[Stage]:
        """Return the stages, from fine to coarse."""
        return cast(list[Stage], list(self.stages))

    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialise all parameters, linear layers from a truncated normal distribution.

        Args:
            needs_reset: Whether parameters other than those of linear layers are uninitialised, as after to_empty().
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif needs_reset and hasattr(module, "reset_parameters"):
                cast(Any, module).reset_parameters()

    def load_pretrained(self, checkpoint_path: str, prefix: str = "") -> None:
        """Load weights for timm (its hook for custom formats): safely, under published names or ours."""
        load_checkpoint(self, checkpoint_path)

    def no_weight_decay(self) -> set[str]:
        """Return the parameters with several dimensions that have no weight decay (timm excludes vectors itself)."""
        return {
            f"{path}.{name}"
            for path, module in self.named_modules()
            for name, _ in module.named_parameters(recurse=False)
            if name in getattr(module, "no_weight_decay_names", ())
        }

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the layers for layer-wise learning rates: the stem, then one per block (or per stage, if coarse)."""
        return {
            "stem": r"^stages\.0\.(?:patch_embed|pos_embed|cls_token)",
            "blocks": r"^stages\.(\d+)"
            if coarse
            else [
                (r"^stages\.(\d+)\.(?:downsample|pos_embed|cls_token)", (0,)),
                (r"^stages\.(\d+)\.blocks\.(\d+)", None),
                (r"^norm", (99999,)),
            ],
        }

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass instead of storing their activations."""
        for stage in self.stage_list():
            stage.grad_checkpointing = enable

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Learn positions for another input size from now on. Inputs of any size work without this, too."""
        check_arguments({"img_size": img_size}, {"img_size": int | tuple[int, int]})
        for stage, reduction in zip(self.stage_list(), self.reductions, strict=True):
            stage.set_grid(grid_of(img_size, reduction))

    def get_classifier(self) -> nn.Module:
        """Return the head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head (0 classes = no head), and the pooling if one is given."""
        check_arguments({"num_classes": num_classes}, {"num_classes": int})
        self.num_classes = num_classes
        if global_pool is not None:
            self.global_pool = self._check_pool(global_pool)
        like = next(self.parameters())
        self.head = make_head(self.num_features, num_classes, device=like.device, dtype=like.dtype)
        self.head.train(self.training)

    def _check_pool(self, global_pool: str) -> str:
        known = ("avg", "token", "") if self.num_prefix_tokens > 0 else ("avg", "")
        if global_pool not in known:
            raise ValueError(f"unknown global_pool {global_pool!r} for this model: choose one of {known}")
        return global_pool

    def normalize(self, x: Tensor) -> Tensor:
        """Apply the norm to the last map (batch, dim, H, W), or to the last tokens (batch, prefix + H·W, dim)."""
        return self.norm(x) if self.num_prefix_tokens > 0 else self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def forward_features(self, x: Tensor) -> Tensor:
        """Map images (batch, in_chans, H, W) to the last map (batch, dim, H', W') or, with a class token, to tokens."""
        return self.normalize(self.stages(as_image(x, self.in_chans)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map features to logits (batch, num_classes), or to the input of the head."""
        if self.num_prefix_tokens > 0:
            x = global_pool_nlc(x, self.global_pool, self.num_prefix_tokens)
        elif self.global_pool == "avg":
            x = x.mean(dim=(2, 3))
        is_map = self.num_prefix_tokens == 0 and self.global_pool == ""
        x = self.fc_norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if is_map else self.fc_norm(x)
        x = self.head_drop(x)
        if pre_logits:
            return x
        return self.head(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if is_map else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, in_chans, H, W) to logits (batch, num_classes)."""
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Return the maps of the levels in feature_info: after the stages or, in a plain transformer, after the blocks.

        Args:
            x: Images (batch, in_chans, H, W).
            indices: The last n levels, a list of levels, or all.
            norm: Apply the last norm to the maps that it fits.
            stop_early: Skip everything after the last requested level.
            output_fmt: "NCHW", or "NLC" for the map's tokens.
            intermediates_only: Return only the maps, not the features.

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

    def forward_levels(self, x: Tensor, take: list[int], last: int | None, norm: bool) -> tuple[Tensor, list[Tensor]]:
        """Return the features and the maps of the levels to take, (batch, dim, H, W), up to the level `last`."""
        maps = []
        stages = self.stage_list()
        for i, stage in enumerate(stages if last is None else stages[: last + 1]):
            tokens, feat_size, _ = stage.forward_tokens(x)
            normed = self.norm(tokens) if i == len(stages) - 1 else tokens
            if i in take:
                maps.append(tokens_to_map(normed if norm else tokens, feat_size, stage.num_prefix_tokens))
            x = normed if stage.num_prefix_tokens > 0 else tokens_to_map(normed, feat_size, 0)
        return x, maps

    def keep_levels(self, count: int) -> None:
        """Drop the levels after the first `count`; the norm only fits the last level."""
        if count < len(self.stages):
            self.norm = nn.Identity()
        self.stages, self.reductions = self.stages[:count], self.reductions[:count]

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the maps of these levels do not need; return the indices of the levels."""
        take, last = feature_take_indices(len(self.feature_info), indices)
        self.keep_levels(last + 1)
        self.feature_info = self.feature_info[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take


@register_notrace_function
def as_image(x: Tensor, in_chans: int) -> Tensor:
    """Return x, or raise ValueError if it is not a floating-point batch of images (batch, in_chans, H, W)."""
    if x.dim() != 4 or x.shape[1] != in_chans:
        raise ValueError(f"expected images of shape (batch, {in_chans}, height, width), but got {x.shape}")
    if not x.is_floating_point():
        raise ValueError(f"expected floating-point images, but got {x.dtype}: convert and normalise them first")
    return x


def make_head(dim: int, num_classes: int, **factory: Any) -> nn.Module:
    """Return a linear classifier, or nn.Identity for 0 classes."""
    return nn.Linear(dim, num_classes, **factory) if num_classes > 0 else nn.Identity()


def tokens_to_map(x: Tensor, feat_size: tuple[int, int], num_prefix_tokens: int) -> Tensor:
    """View tokens (batch, prefix + H·W, dim) as a map (batch, dim, H, W)."""
    return x[:, num_prefix_tokens:].unflatten(1, feat_size).permute(0, 3, 1, 2)


def grid_of(img_size: int | tuple[int, int], reduction: int) -> tuple[int, int]:
    """Return (H, W) of the map with one token per reduction × reduction pixels, rounded up."""
    height, width = to_2tuple(img_size)
    return -(-height // reduction), -(-width // reduction)


def check_dims(dims: Sequence[int]) -> None:
    """Raise ValueError for more channels than make sense."""
    for stage, dim in enumerate(dims):
        if dim > MOST_CHANNELS:
            raise ValueError(
                f"stage {stage} would have {dim} channels, but the maximum is {MOST_CHANNELS}: choose fewer channels "
                "for the first stage, or fewer stages"
            )


def check_attn_kwargs(attn_kwargs: Mapping[str, Any], attentions: Iterable[str]) -> None:
    """Raise ValueError for arguments that none of the named attentions has, and for values of the wrong type."""
    kinds = {find_attention(name) for name in attentions}
    known = {argument for kind in kinds for argument in kind.attn_kwargs_names} | set(SURROUNDINGS)
    for argument, value in attn_kwargs.items():
        if argument in SURROUNDINGS:
            check_value(f"{argument} in attn_kwargs", value, SURROUNDINGS[argument])
            if argument == "lepe":
                check_lepe("lepe in attn_kwargs", value)
        for kind in kinds:
            if argument in ATTENTION_SURROUNDINGS and argument not in constructor_types(kind):
                raise ValueError(
                    f"the constructor of {kind.__name__} does not take {argument}, which is in attn_kwargs: leave it "
                    "out, or have it pass **kwargs to that of BaseAttention"
                )
            if argument in kind.attn_kwargs_names:
                check_value(f"{argument} in attn_kwargs", value, constructor_types(kind)[argument])
        if argument not in known:
            named = " and ".join(sorted(set(attentions)))
            raise ValueError(
                f"{named} attention has no argument {argument!r} in attn_kwargs: choose one of "
                f"{', '.join(sorted(known))}"
            )


def check_stages(depths: Sequence[int], **by_stage: Sequence[Any] | None) -> None:
    """Raise ValueError for arguments that do not have one entry per stage."""
    for name, entries in by_stage.items():
        if entries is not None and len(entries) != len(depths):
            raise ValueError(f"{name} must have an entry for each of the {len(depths)} stages, but it is {entries}")


def grid_options(kind: type[BaseAttention], layout: Layout, feat_size: tuple[int, int]) -> dict[str, Any]:
    """Return `grid` for an attention that learns positions: (H, W) of its windows or, with stripes, of the map."""
    if not kind.learns_grid:
        return {}
    windows = layout(feat_size)
    return {"grid": (windows[0].window_height, windows[0].window_width) if len(windows) == 1 else feat_size}


def square_windows(window_size: int | None, block: int) -> WholeMap | SquareWindows:
    """Return windows that are shifted in every second block, or the whole map if no size is given."""
    return WholeMap() if window_size is None else SquareWindows(window_size, shifted=block % 2 == 1)
