"""InLine attention: linear attention made injective and local, and the vision transformers built on it.

Importing this package registers its models with timm: `timm.create_model("inline_swin_tiny")`. They are registered when
timm is imported, before or after this package, so that importing this package alone costs nothing.
"""

import sys
from types import ModuleType

import lazy_loader
import wrapt

__version__ = "0.1.0"

__all__ = ["InLineAttention", "__version__", "layers", "load_checkpoint", "models", "ops", "optimize_for_inference"]

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__,
    submodules=["layers", "models", "ops"],
    submod_attrs={
        "layers": ["InLineAttention"],
        "models": ["load_checkpoint"],
        "models.inference": ["optimize_for_inference"],
    },
)


_loaded: set[str] = set()


@wrapt.when_imported("timm.models")
@wrapt.when_imported(f"{__name__}.layers")
def register_models(module: ModuleType) -> None:
    """Register the models with timm when it is imported, or after `layers`, which they need, if that imports it."""
    _loaded.add(module.__name__)
    layers = f"{__name__}.layers"
    if layers not in sys.modules or layers in _loaded:
        from . import models  # noqa: F401
