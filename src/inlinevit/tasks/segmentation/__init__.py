"""A class for each pixel: data in ADE20K's layout, SemanticFPN and UperNet, evaluation, prediction."""

from .model import build_segmenter, semantic_fpn, upernet

__all__ = ["build_segmenter", "semantic_fpn", "upernet"]
