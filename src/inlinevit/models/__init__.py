"""The models. Importing this registers them with timm."""

from . import baseline_deit as baseline_deit
from ._checkpoint import load_checkpoint
from ._inline_vit import InLineViT, attention_by_stage
from ._pretrained import PretrainedWeightsError
from .inline_cswin import InLineCSWin
from .inline_deit import InLineDeiT
from .inline_pvt import InLinePVT
from .inline_swin import InLineSwin
from .replace import replace_attention

__all__ = [
    "InLineCSWin",
    "InLineDeiT",
    "InLinePVT",
    "InLineSwin",
    "InLineViT",
    "PretrainedWeightsError",
    "attention_by_stage",
    "baseline_deit",
    "load_checkpoint",
    "replace_attention",
]
