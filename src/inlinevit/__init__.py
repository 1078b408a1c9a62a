"""InLine attention: linear attention made injective and local, and the vision transformers built on it.

Importing this package registers its models with timm: `timm.create_model("inline_swin_tiny")`.
"""

from . import layers, models, ops
from .layers import InLineAttention
from .models import load_checkpoint
from .models.inference import optimize_for_inference

__version__ = "0.1.0"

__all__ = ["InLineAttention", "__version__", "layers", "load_checkpoint", "models", "ops", "optimize_for_inference"]
