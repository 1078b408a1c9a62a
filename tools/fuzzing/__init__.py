"""Inputs that are almost right, for everything that reads files of others; see tools/fuzz.py."""

# The targets. They are imported when they are needed: that takes seconds.
NAMES = ("weights", "safetensors", "checkpoint", "labels", "recipe", "coco", "images", "regions")
