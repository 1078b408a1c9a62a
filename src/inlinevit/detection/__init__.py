"""Objects in images, with boxes and masks: data in COCO format, Mask R-CNN and its cascade, evaluation, prediction."""
