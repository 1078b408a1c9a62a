"""Experiments that train several models: the demo, and the paper's ablations."""
