"""The contract of timm's models, kept once for all four families."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from timm.layers import global_pool_nlc, register_notrace_function, trunc_normal_
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ..layers import PositionEmbedding
from ._arguments import check_arguments
from ._checkpoint import load_checkpoint
from ._stage import Stage, grid_of, tokens_to_map

# The part of published_names that the families share.
LOCAL_RESIDUAL_NAMES = (
    (r"\.residual\.0\.", ".local_residual.fc1."),
    (r"\.residual\.2\.", ".local_residual.fc2."),
)


@register_notrace_function
def as_image(x: Tensor, in_chans: int) -> Tensor:
    """x, if it is a batch of images (batch, in_chans, H, W) in floating point."""
    if x.dim() != 4 or x.shape[1] != in_chans:
        raise ValueError(f"expected images of shape (batch, {in_chans}, height, width), but got {x.shape}")
    if not x.is_floating_point():
        raise ValueError(f"expected floating-point images, but got {x.dtype}: convert and normalise them first")
    return x


def make_head(dim: int, num_classes: int, **factory: Any) -> nn.Module:
    """A classifier, or nothing for 0 classes."""
    return nn.Linear(dim, num_classes, **factory) if num_classes > 0 else nn.Identity()


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
    # The levels that `features_only=True` gives if none are named.
    default_out_indices: int | tuple[int, ...] = (0, 1, 2, 3)

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
        self.reductions = list(reductions)
        self.stages = nn.Sequential(*stages)
        self.norm = norm
        self.head_drop = nn.Dropout(drop_rate)
        self.global_pool = self._check_pool(global_pool)
        self.head = make_head(dims[-1], num_classes, device=device, dtype=dtype)
        # Set by optimize_for_inference: in the last block, compute the class token alone if the head sees no other.
        self.saves_last_block = False
        self.init_weights(needs_reset=False)

    @torch.jit.ignore
    def stage_list(self) -> list[Stage]:
        """The stages, from fine to coarse."""
        return cast(list[Stage], list(self.stages))

    @torch.jit.ignore
    def init_weights(self, needs_reset: bool = True) -> None:
        """Draw all parameters anew, linear layers from a truncated normal.

        Args:
            needs_reset: Whether the parameters other than those of linear layers hold nothing yet, as after to_empty().
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif needs_reset and hasattr(module, "reset_parameters"):
                cast(Any, module).reset_parameters()

    @torch.jit.ignore
    def load_pretrained(self, checkpoint_path: str, prefix: str = "") -> None:
        """timm's hook for weights in a form of our own: read them safely, under published names or ours."""
        load_checkpoint(self, checkpoint_path)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Parameters with more than one dimension that are not to decay (timm leaves out vectors by itself)."""
        suffixes = (
            "class_token",
            "positions.table",
            "relative_position_bias_table",
            "feature_map.bias",
            "attn.spread",
        )
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
        for stage in self.stage_list():
            stage.grad_checkpointing = enable

    @torch.jit.ignore
    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Keep learned positions for another input size from now on. Inputs of any size work without this, too."""
        check_arguments({"img_size": img_size}, {"img_size": int | tuple[int, int]})
        for stage, reduction in zip(self.stage_list(), self.reductions, strict=True):
            if stage.positions is not None:
                before = stage.positions.grid
                # Attention may have learned positions of its own, for the map or for windows.
                for module in stage.modules():
                    if isinstance(module, PositionEmbedding) and module.grid == before:
                        module.set_grid(grid_of(img_size, reduction))

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    @torch.jit.ignore
    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Give the model a new head (0 = none), and another pooling if one is named."""
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
        """The norm of the last stage's output, a map (batch, dim, H, W) or tokens (batch, prefix + H·W, dim)."""
        return self.norm(x) if self.num_prefix_tokens > 0 else self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (batch, in_chans, H, W) to the last map (batch, dim, H', W'), or with a class token to its tokens."""
        return self.normalize(self.stages(as_image(x, self.in_chans)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features to logits (batch, num_classes), or to what goes into the head."""
        if self.num_prefix_tokens > 0:
            x = global_pool_nlc(x, self.global_pool, self.num_prefix_tokens)
        elif self.global_pool == "avg":
            x = x.mean(dim=(2, 3))
        x = self.head_drop(x)
        if pre_logits:
            return x
        is_map = self.num_prefix_tokens == 0 and self.global_pool == ""
        return self.head(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if is_map else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, in_chans, H, W) to logits (batch, num_classes)."""
        if not torch.jit.is_scripting() and self.saves_last_block and self.global_pool == "token":
            return self.forward_head(self.forward_class_token(x))
        return self.forward_head(self.forward_features(x))

    @torch.jit.ignore
    def forward_class_token(self, x: Tensor) -> Tensor:
        """forward_features, but the class token alone: (batch, 1, dim)."""
        *before, last = self.stage_list()
        x = as_image(x, self.in_chans)
        for stage in before:
            x = stage(x)
        return self.norm(last.forward_tokens(x, [], prefix_only=True)[0])

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
        """Features and the maps to take, (batch, dim, H, W); levels after `last` are left out."""
        maps = []
        stages = self.stage_list()
        for i, stage in enumerate(stages if last is None else stages[: last + 1]):
            tokens, size, _ = stage.forward_tokens(x, [])
            normed = self.norm(tokens) if i == len(stages) - 1 else tokens
            if i in take:
                maps.append(tokens_to_map(normed if norm else tokens, size, stage.num_prefix_tokens))
            x = normed if stage.num_prefix_tokens > 0 else tokens_to_map(normed, size, 0)
        return x, maps

    @torch.jit.ignore
    def keep_levels(self, count: int) -> None:
        """Drop the levels after the first `count`; the norm fits the last level only."""
        if count < len(self.stages):
            self.norm = nn.Identity()
        self.stages, self.reductions = self.stages[:count], self.reductions[:count]

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
