"""Small models of all kinds that can be streamed."""

from typing import Any

import pytest
import timm
import torch
from torch import nn

from inlinevit.streaming import streamer

DEIT = {"depth": 2, "embed_dim": 24, "num_heads": 3, "img_size": 64}
PVT = {"depths": (1, 1, 1, 2), "embed_dims": (16, 16, 24, 32), "num_heads": (2, 2, 2, 4), "img_size": 64}
SWIN = {"depths": (2, 1, 2, 2), "embed_dim": 12, "num_heads": (3, 3, 3, 6), "img_size": 64}
CSWIN = {"depths": (1, 1, 2, 1), "embed_dim": 16, "num_heads": (2, 2, 4, 4), "img_size": 64}
# Streaming takes all but rope.
SURROUNDED = {"gate": True, "lepe": 5, "cpe": True, "mlp_conv": True}

# The four families.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deit": ("inline_deit_tiny", DEIT),
    "pvt": ("inline_pvt_tiny", PVT),
    "swin": ("inline_swin_tiny", SWIN),
    "cswin": ("inline_cswin_tiny", CSWIN),
}
# Other layouts, attentions and options.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "no class token": ("inline_deit_tiny", {**DEIT, "class_token": False, "global_pool": "avg"}),
    "class token, avg": ("inline_deit_tiny", {**DEIT, "global_pool": "avg"}),
    "relu_affine": ("inline_deit_tiny", {**DEIT, "attn_kwargs": {"feature_map": "relu_affine"}}),
    "no local residual": ("inline_deit_tiny", {**DEIT, "attn_kwargs": {"local_residual": False}}),
    "inline windows": ("inline_swin_tiny", {**SWIN, "attention": "inline", "window_size": 5}),
    "softmax windows": ("inline_swin_tiny", {**SWIN, "attention": "softmax"}),
    "inline stripes": ("inline_cswin_tiny", {**CSWIN, "attention": "inline", "window_size": 3}),
    "softmax stripes": ("cswin_tiny", CSWIN),
    "linear stripes": ("inline_cswin_tiny", {**CSWIN, "attention": "linear", "window_size": 3}),
    "reduced softmax": ("pvt_tiny", {**PVT, "num_heads": (1, 2, 2, 4)}),
    "softmax": ("softmax_deit_tiny", DEIT),
    "linear": ("linear_deit_tiny", DEIT),
    "hydra": ("hydra_deit_tiny", DEIT),
    "efficient": ("efficient_deit_tiny", DEIT),
    "enhanced": ("enhanced_deit_tiny", DEIT),
    "focused": ("focused_deit_tiny", DEIT),
    "focused windows": ("inline_swin_tiny", {**SWIN, "attention": "focused", "window_size": 5}),
    "focused stripes": ("inline_cswin_tiny", {**CSWIN, "attention": "focused", "window_size": 3}),
    "angular": ("angular_deit_tiny", DEIT),
    "angular windows": ("inline_swin_tiny", {**SWIN, "attention": "angular", "window_size": 5}),
    "angular stripes": ("inline_cswin_tiny", {**CSWIN, "attention": "angular", "window_size": 3}),
    "surrounded": ("inline_deit_tiny", {**DEIT, "attn_kwargs": SURROUNDED}),
    "surrounded windows": ("inline_swin_tiny", {**SWIN, "window_size": 5, "attn_kwargs": SURROUNDED}),
    "surrounded stripes": ("inline_cswin_tiny", {**CSWIN, "window_size": 3, "attn_kwargs": SURROUNDED}),
    "surrounded linear": ("linear_deit_tiny", {**DEIT, "attn_kwargs": SURROUNDED}),
    "enhanced stripes": ("inline_cswin_tiny", {**CSWIN, "attention": "enhanced", "window_size": 3}),
}
MODELS = FAMILIES | VARIANTS


def make_model(kind: str, **options: Any) -> nn.Module:
    """Return a model whose attention and convolutions matter."""
    torch.manual_seed(0)
    name, arguments = MODELS[kind]
    model = timm.create_model(name, num_classes=7, **arguments, **options).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=1.5 * parameter[0].numel() ** -0.5)
        else:
            nn.init.normal_(parameter, mean=0.5, std=0.2)
    return model


def make_image(height: int, width: int) -> torch.Tensor:
    """Return an image whose parts differ."""
    torch.manual_seed(1)
    ramp = torch.linspace(-1, 1, height)[:, None] * torch.linspace(-2, 1, width)
    return torch.randn(1, 3, height, width) + ramp


def spill_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tokens in files, whatever the memory."""
    make_plan = streamer.make_plan

    def make_spilled_plan(*arguments: Any, **options: Any) -> Any:
        return make_plan(*arguments, **{**options, "must_spill": True})

    monkeypatch.setattr(streamer, "make_plan", make_spilled_plan)
