"""InLine attention: linear attention made injective and local, and the vision transformers built on it.

Importing this package registers its models with timm: `timm.create_model("inline_swin_tiny")`. They are registered when
timm is imported, before or after this package, so that importing this package alone costs nothing.
"""

from types import ModuleType

import lazy_loader
import wrapt

__version__ = "0.1.0"

__all__ = [
    "InLineAttention",
    "PretrainedWeightsError",
    "__version__",
    "layers",
    "list_attentions",
    "load",
    "load_checkpoint",
    "models",
    "ops",
    "optimize_for_inference",
    "parallelize_sequence",
    "register_attention",
    "replace_attention",
    "stream",
    "testing",
]

__getattr__, _, _ = lazy_loader.attach(
    __name__,
    submodules=["layers", "models", "ops", "testing"],
    submod_attrs={
        "layers": ["InLineAttention", "list_attentions", "register_attention"],
        "models": ["PretrainedWeightsError", "load_checkpoint", "replace_attention"],
        "models.inference": ["optimize_for_inference"],
        "parallel": ["parallelize_sequence"],
        "data.streaming": ["stream"],
        "tasks.loading": ["load"],
    },
)


def __dir__() -> list[str]:
    """Return the public names, also those that are not imported yet."""
    return [*globals(), *__all__]


@wrapt.when_imported("timm.models")
def import_layers(timm_models: ModuleType) -> None:
    """Import the layers; if they are the ones that import timm, this does nothing."""
    from . import layers  # noqa: F401


@wrapt.when_imported("inlinevit.layers")
def register_models(layers: ModuleType) -> None:
    """Register the models with timm, as soon as the layers are complete."""
    from . import models  # noqa: F401
