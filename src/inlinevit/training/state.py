"""Weights and states of models and optimizers, whole, however they are spread over processes."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def is_sharded(model: nn.Module) -> bool:
    """Whether each process holds a part of the parameters only."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def get_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights under the names of the bare model; with sharded ones, every process must call this."""
    return _apart(get_model_state_dict(model, options=WHOLE))


def set_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Put all weights back."""
    try:
        set_model_state_dict(model, dict[str, Any](weights), options=WHOLE)
    except RuntimeError as error:
        problem = " ".join(str(error).split())
        raise ValueError(
            f"the checkpoint is of another model ({problem[:200]}): go on with the one it was written with"
        ) from error


def own_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights that this process holds, without asking others."""
    return _apart(model.state_dict())


def _apart(weights: dict[str, Any]) -> dict[str, Tensor]:
    """Weights that share no memory, as a file of safetensors wants them."""
    own = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in weights.items()}
    return {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in own.items()}


def get_state(model: nn.Module, optimizer: Any, accelerator: Accelerator) -> dict[str, Any]:
    """What beside the weights a run needs to go on just as it was."""
    bare = optimizer.optimizer
    state = get_optimizer_state_dict(model, bare, options=WHOLE) if is_sharded(model) else bare.state_dict()
    scaler = None if accelerator.scaler is None else accelerator.scaler.state_dict()
    return {"optimizer": state, "scaler": scaler}


def set_state(model: nn.Module, optimizer: Any, accelerator: Accelerator, state: dict[str, Any]) -> None:
    """Put back what get_state gave."""
    bare = optimizer.optimizer
    if is_sharded(model):
        set_optimizer_state_dict(model, bare, state["optimizer"], options=WHOLE)
    else:
        bare.load_state_dict(state["optimizer"])
    if accelerator.scaler is not None and state["scaler"] is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
