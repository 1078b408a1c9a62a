"""Which models can be streamed."""

import torch
from torch import nn

from ..layers import BaseAttention
from ..layers._chunks import has_hooks
from ..models._inline_vit import InLineViT


def check_model(model: nn.Module) -> InLineViT:
    """Return the model, or raise ValueError if it cannot be streamed."""
    if not isinstance(model, InLineViT):
        raise ValueError(
            f"{type(model).__name__} cannot be streamed: use a classification model of inlinevit, such as "
            'timm.create_model("inline_deit_tiny")'
        )
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first")
    if any(weight.dtype != torch.float32 or weight.device.type != "cpu" for weight in model.parameters()):
        raise ValueError("streaming computes in float32 on the CPU: call model.float().cpu() first")
    if has_hooks(model):
        raise ValueError("modules of the model have hooks, which streaming does not call: remove them")
    if any(isinstance(module, BaseAttention) and module.rope for module in model.modules()):
        raise ValueError(
            "attention with rope cannot be streamed, since chunks do not know their rows: use a model without rope"
        )
    if model.global_pool == "":
        raise ValueError(
            "without pooling, the result is a map as large as the image: set global_pool to 'avg' or 'token', and ask "
            "for the map 'norm' in features"
        )
    return model
