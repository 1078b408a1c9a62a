"""The models. Importing this registers them with timm."""

from . import baseline_deit as baseline_deit
from ._backbone import Backbone, attention_by_stage
from ._checkpoint import load_checkpoint
from ._pretrained import PretrainedWeightsError
from .inline_cswin import InLineCSWin
from .inline_deit import InLineDeiT
from .inline_pvt import InLinePVT
from .inline_swin import InLineSwin
from .replace import replace_attention

__all__ = [
    "Backbone",
    "InLineCSWin",
    "InLineDeiT",
    "InLinePVT",
    "InLineSwin",
    "PretrainedWeightsError",
    "attention_by_stage",
    "baseline_deit",
    "load_checkpoint",
    "replace_attention",
]
