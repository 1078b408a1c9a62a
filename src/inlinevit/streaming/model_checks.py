"""Which models can be streamed."""

import torch
from timm.models._features import FeatureGetterNet
from torch import nn

from ..layers import BaseAttention
from ..layers._chunks import has_hooks
from ..models._inline_vit import InLineViT


def check_model(model: nn.Module) -> InLineViT:
    """Return the model, or raise ValueError if it cannot be streamed."""
    if not isinstance(model, InLineViT):
        raise ValueError(
            f"{type(model).__name__} cannot be streamed: use a classification model of inlinevit, such as "
            'timm.create_model("inline_deit_tiny"), or a segmentation model of inlinevit.tasks.segmentation'
        )
    check_state(model)
    if model.global_pool == "":
        raise ValueError(
            "without pooling, the result is a map as large as the image: set global_pool to 'avg' or 'token', and ask "
            "for the map 'norm' in features"
        )
    return model


def check_backbone(model: nn.Module, body: nn.Module) -> InLineViT:
    """Return the network of a backbone, or raise ValueError if it, or the model that has it, cannot be streamed.

    Args:
        model: The whole model.
        body: The backbone: a model of timm with features_only=True.
    """
    network = getattr(body, "model", None)
    if type(body) is not FeatureGetterNet or not isinstance(network, InLineViT) or body.norm:
        name = type(body if network is None else network).__name__
        raise ValueError(
            f"the backbone {name} cannot be streamed: use a segmentation model on one of inlinevit, such as "
            "inline_pvt_tiny"
        )
    check_state(model)
    return network


def check_state(model: nn.Module) -> None:
    """Raise ValueError for a model that is not ready to be streamed."""
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
