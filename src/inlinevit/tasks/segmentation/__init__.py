"""Semantic segmentation: ADE20K's layout, SemanticFPN and UperNet."""

import lazy_loader

__all__ = ["build_segmenter", "semantic_fpn", "upernet"]
__getattr__, __dir__, _ = lazy_loader.attach(__name__, submod_attrs={"model": __all__})
