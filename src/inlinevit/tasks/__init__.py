"""The tasks: classification, detection, segmentation."""
