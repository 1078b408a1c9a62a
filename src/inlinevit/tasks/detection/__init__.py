"""Object detection and instance segmentation: COCO data, Mask R-CNN and Cascade Mask R-CNN."""

import lazy_loader

__all__ = ["PyramidBackbone", "build_detector", "cascade_mask_rcnn", "mask_rcnn", "pyramid_backbone"]
__getattr__, __dir__, _ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "model": ["build_detector", "cascade_mask_rcnn", "mask_rcnn"],
        "pyramid": ["PyramidBackbone", "pyramid_backbone"],
    },
)
