"""Why it works: confusion, locality, masking and maps of attention. Functions that return data; drawings apart."""

from .confusion import Confusion, LayerConfusion, measure_confusion
from .hooks import run_masked, watch
from .layer import Convolution, Layer
from .locality import LayerLocality, measure_locality
from .maps import AttentionMap, attention_maps
from .masking import MaskedAccuracy, Masking, measure_masking

__all__ = [
    "AttentionMap",
    "Confusion",
    "Convolution",
    "Layer",
    "LayerConfusion",
    "LayerLocality",
    "MaskedAccuracy",
    "Masking",
    "attention_maps",
    "measure_confusion",
    "measure_locality",
    "measure_masking",
    "run_masked",
    "watch",
]
