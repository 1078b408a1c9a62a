"""The interface of timm's models, implemented once for all four families."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from timm.layers import global_pool_nlc, register_notrace_function, trunc_normal_
from timm.models._features import feature_take_indices
from torch import Tensor, nn

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
    """Return x, or raise ValueError if it is not a floating-point batch of images (batch, in_chans, H, W)."""
    if x.dim() != 4 or x.shape[1] != in_chans:
        raise ValueError(f"expected images of shape (batch, {in_chans}, height, width), but got {x.shape}")
    if not x.is_floating_point():
        raise ValueError(f"expected floating-point images, but got {x.dtype}: convert and normalise them first")
    return x


def make_head(dim: int, num_classes: int, **factory: Any) -> nn.Module:
    """Return a linear classifier, or nn.Identity for 0 classes."""
    return nn.Linear(dim, num_classes, **factory) if num_classes > 0 else nn.Identity()


class Backbone(nn.Module):
    """Stages, a norm and a head, with the interface of timm's models.

    Args:
        stages: The stages, from fine to coarse.
        norm: The norm of the last stage's tokens.
        dims: Channels of each stage.
        reductions: Stride of each stage, in pixels per token.
        num_classes: Width of the head; 0 = none.
        in_chans: Channels of the images.
        global_pool: "avg" over the map, "token" for the class token, or "" for none.
        drop_rate: Dropout before the head.
    """

    # From published names to ours: (regular expression, replacement), all applied in order. Several published
    # parameters may be parts of one of ours; their names then end in #0, #1, ….
    published_names: tuple[tuple[str, str], ...] = ()
    # The default levels of `features_only=True`.
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
        suffixes = (
            "cls_token",
            "pos_embed",
            "relative_position_bias_table",
            "feature_map.bias",
            "attn.spread",
        )
        return {name for name, _ in self.named_parameters() if name.endswith(suffixes)}

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
        x = self.head_drop(x)
        if pre_logits:
            return x
        is_map = self.num_prefix_tokens == 0 and self.global_pool == ""
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
