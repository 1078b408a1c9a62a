"""Weights and states of models and optimizers, sharded or not: to files and back."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .checkpoints import LARGEST_COUNT, FileEntry, pack_state, pack_weights, read_state, read_weights, sha256_of

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
SHARDED = StateDictOptions(flatten_optimizer_state_dict=True)
# Settings of a run in the state of its optimizer: those of this run are used, not those of the checkpoint.
SETTINGS = ("betas", "eps", "initial_lr", "lr_scale", "momentum", "weight_decay")


def is_sharded(model: nn.Module) -> bool:
    """Whether each process holds only a part of the parameters."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Gather all parameters of a sharded model in every process, so that each can run it on its own.

    Processes with different numbers of images would otherwise wait for each other forever. Every process must enter and
    leave this context. For a model that is not sharded, it does nothing.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for module in sharded:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        yield
    finally:
        for number, module in enumerate(sharded):
            module.reshard()
            # The first is the model itself, whose parameters are needed again at once in the backward pass.
            module.set_reshard_after_forward(number > 0, recurse=False)


def get_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights under the names of the bare model; with a sharded one, every process must call this."""
    return _copied(get_model_state_dict(model, options=FULL))


def check_weights(own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse weights that are not those of a model, by name; only their shapes and types matter."""
    for name in sorted(own.keys() | given.keys()):
        ours, theirs = own.get(name), given.get(name)
        if theirs is None:
            problem = "is missing"
        elif ours is None:
            problem = "is unknown"
        elif tuple(ours.shape) != tuple(theirs.shape) or ours.dtype != theirs.dtype:
            problem = f"is {_describe(theirs)} in place of {_describe(ours)}"
        else:
            continue
        raise ValueError(
            f"the checkpoint is of another model ({name[:100]} {problem}): resume with the one it was written with"
        )


def _describe(value: Any) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def own_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that this process has, without those of others."""
    return _copied(model.state_dict())


def whole_tensor(tensor: Tensor) -> Tensor:
    """A tensor that may be sharded, as an ordinary one; with a sharded one, every process must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def all_finite(parameters: Iterable[Tensor], accelerator: Accelerator) -> bool:
    """Whether no parameter in any process is NaN or infinite; every process must call this."""
    own = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in parameters]
    is_bad = torch.stack([~value.detach().isfinite().all() for value in own]).any()
    return accelerator.reduce(is_bad.float(), "sum").item() == 0


def _copied(weights: dict[str, Any]) -> dict[str, Tensor]:
    """Return copies of weights, which share no memory, as safetensors requires."""
    own = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in weights.items()}
    return {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in own.items()}


def pack(model: nn.Module, ema: nn.Module | None, optimizer: Any, accelerator: Accelerator) -> dict[str, bytes]:
    """Return the files of a checkpoint of a model that is not sharded; arguments as for RunFolder.begin."""
    models = {"model": model} if ema is None else {"model": model, "ema": ema}
    weights = {f"{name}.safetensors": pack_weights(get_weights(module)) for name, module in models.items()}
    return {**weights, **pack_state(_with_scaler(optimizer.optimizer.state_dict(), accelerator))}


def restore(path: Path, model: nn.Module, ema: nn.Module | None, optimizer: Any, accelerator: Accelerator) -> None:
    """Load a checkpoint, for sharded models and others.

    Raises:
        ValueError: It does not fit.
    """
    if is_sharded(model):
        _load_shards(path, model, optimizer, accelerator)
        return
    models = {"model": model} if ema is None else {"model": model, "ema": ema}
    weights = {name: read_weights(path, name) for name in models}
    for name, module in models.items():
        check_weights(get_model_state_dict(module), weights[name])
    # The optimizer first, because finding out what its state looks like changes weights.
    optimizer.optimizer.load_state_dict(_read_like(path, _stepped_state(optimizer.optimizer), accelerator))
    for name, module in models.items():
        set_model_state_dict(module, dict[str, Any](weights[name]), options=FULL)


def _with_scaler(state: Any, accelerator: Accelerator) -> dict[str, Any]:
    """Return the state of an optimizer together with that of float16's gradient scaler."""
    return {"optimizer": state, "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict()}


def _stepped_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer after a step, which changes its parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    return optimizer.state_dict()


def _read_like(path: Path, own: dict[str, Any], accelerator: Accelerator) -> dict[str, Any]:
    """Load the gradient scaler from a checkpoint, and return the state of its optimizer, checked against our own."""
    values = read_state(path)
    if "state" in own:
        # Parameters that never had a gradient have no state.
        found = {name.split(".")[2] for name in values if name.startswith("optimizer.state.")}
        own = {**own, "state": {index: state for index, state in own["state"].items() if str(index) in found}}
    if "param_groups" in own and not any(".param_names." in name for name in values):
        # Older versions did not store them.
        groups = [{key: item for key, item in one.items() if key != "param_names"} for one in own["param_groups"]]
        own = {**own, "param_groups": groups}
    try:
        state = _like(_with_scaler(own, accelerator), values)
        if values:
            raise ValueError(f"{min(values)[:100]} is unknown")
    except ValueError as error:
        raise _mismatch(path, error) from None
    if accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    return state["optimizer"]


def _mismatch(path: Path, error: ValueError) -> ValueError:
    return ValueError(
        f"the state in checkpoint {path} is not that of this run's optimizer ({error}): resume with the settings it "
        "was written with, or from another checkpoint"
    )


def _like(own: Any, values: dict[str, Any], name: str = "") -> Any:
    """Return a state that was read, in the structure of our own.

    Numbers and tensors may differ in their values, all else may not. Of SETTINGS, our own values are given.

    Args:
        own: Our state, or a part of it.
        values: The values that were read, by their path in the state; those that are used are removed.
        name: The path of the part.
    """
    prefix = f"{name}." if name else ""
    if isinstance(own, Mapping):
        read = {key: _like(item, values, f"{prefix}{key}") for key, item in own.items()}
        # Where parameters have names, settings are called param_groups.NAME.betas.
        return {key: own[key] if str(key).rpartition(".")[2] in SETTINGS else item for key, item in read.items()}
    if isinstance(own, list | tuple):
        return type(own)(_like(item, values, f"{prefix}{number}") for number, item in enumerate(own))
    if name not in values:
        raise ValueError(f"{name} is missing")
    given = values.pop(name)
    if isinstance(own, Tensor):
        if not isinstance(given, Tensor) or given.shape != own.shape or given.dtype != own.dtype:
            found = _describe(given) if isinstance(given, Tensor) else f"{given!r:.40}"
            raise ValueError(f"{name} is {found} in place of {_describe(own)}")
    elif type(given) in (int, float) and (own is None or type(own) in (int, float)):
        # Some optimizers have None in place of numbers that they have not computed yet.
        if not abs(given) < math.inf and own != given:
            raise ValueError(f"{name} is {given!r:.40} in place of a finite number")
    elif type(given) is not type(own) or given != own:
        raise ValueError(f"{name} is {given!r:.40} in place of {own!r:.40}")
    _check_step(name, given)
    return given


def _check_step(name: str, value: Any) -> None:
    """Refuse a number of steps that no optimizer can have taken."""
    step = value.item() if isinstance(value, Tensor) and name.endswith(".step") else value
    if name.endswith(".step") and not 0 <= step < LARGEST_COUNT:
        raise ValueError(f"{name} is {step!r:.40}, which is not a number of steps")


def save_shards(
    folder: Path, model: nn.Module, optimizer: Any, accelerator: Accelerator
) -> tuple[dict[str, FileEntry], dict[str, bytes]]:
    """Write this process's part of a sharded model and of its optimizer's state; every process must call this.

    Returns:
        The file that was written, and the files, not yet written, with what is the same in all processes.
    """
    tensors, values = _split(model, optimizer)
    try:
        dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        for problem, _ in error.failures.values():
            if isinstance(problem, OSError):
                raise problem from error
        raise
    file = folder / f"shard-{accelerator.process_index + 1:05d}-model-00001-of-00001.safetensors"
    entries = {}
    if file.is_file():
        with file.open("rb") as stream:
            entries[file.name] = {"bytes": file.stat().st_size, "sha256": sha256_of(stream)}
    return entries, pack_state(_with_scaler(values, accelerator))


def _split(model: nn.Module, optimizer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a model and its optimizer, named "model.…" and "optimizer.…", and the optimizer's values.

    An optimizer without a state takes a step first.
    """
    weights = get_model_state_dict(model, options=SHARDED)
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer.optimizer, options=SHARDED)
    tensors: dict[str, Any] = {f"model.{name}": value for name, value in weights.items()}
    tensors |= {f"optimizer.{name}": value for name, value in state.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in state.items() if not isinstance(value, Tensor)}


def _load_shards(path: Path, model: nn.Module, optimizer: Any, accelerator: Accelerator) -> None:
    """Load what save_shards has written, on any number of processes."""
    tensors, values = _split(model, optimizer)
    values = _read_like(path, values, accelerator)
    check_weights(tensors, shard_layout(path))
    read_shards(path, tensors)
    weights, states = (
        {name.removeprefix(prefix): cast(Any, value) for name, value in tensors.items() if name.startswith(prefix)}
        for prefix in ("model.", "optimizer.")
    )
    try:
        for name, value in states.items():
            _check_step(name, value)
    except ValueError as error:
        raise _mismatch(path, error) from None
    set_model_state_dict(model, weights, options=SHARDED)
    set_optimizer_state_dict(model, optimizer.optimizer, states | values, options=SHARDED)


def read_shards(path: Path, tensors: dict[str, Tensor]) -> None:
    """Read tensors of a sharded checkpoint in place; they have the names and shapes of its shard_layout()."""
    try:
        with warnings.catch_warnings():
            # Reading in a single process is what is wanted there.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            reader = HuggingFaceStorageReader(str(path))
            dcp.load(dict[str, Any](tensors), storage_reader=reader, no_dist=not torch.distributed.is_initialized())
    # Files that were edited fail in many ways.
    except (CheckpointException, Exception) as error:
        raise ValueError(
            f"the shards of checkpoint {path} do not fit together ({str(error)[:200]}): resume from another one"
        ) from None


def shard_layout(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a sharded checkpoint by name, without their values, on the meta device.

    Raises:
        ValueError: The files are not valid, or shards are missing.
    """
    try:
        stored: dict[str, Any] = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
        sizes = {name: sum(math.prod(chunk.sizes) for chunk in tensor.chunks) for name, tensor in stored.items()}
    # safetensors raises errors of its own, and headers can hold anything.
    except Exception as error:
        raise ValueError(
            f"the shards of checkpoint {path} are not valid ({str(error)[:200]}): choose another"
        ) from None
    for name, tensor in stored.items():
        if sizes[name] != math.prod(tensor.size):
            raise ValueError(f"checkpoint {path} lacks a part of {name[:100]}: resume from another one")
    return {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype, device="meta") for name, tensor in stored.items()
    }
