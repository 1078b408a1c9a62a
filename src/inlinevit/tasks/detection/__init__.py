"""Objects in images, with boxes and masks: data in COCO format, Mask R-CNN and its cascade, evaluation, prediction."""

from .model import build_detector, cascade_mask_rcnn, mask_rcnn

__all__ = ["build_detector", "cascade_mask_rcnn", "mask_rcnn"]
