"""Analyses of attention: confusion, locality, masking, maps. Functions that return data; plots are separate."""

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
