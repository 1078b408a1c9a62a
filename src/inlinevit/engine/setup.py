"""Accelerator, optimizer, schedule, EMA and sharding, from a configuration."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs
from timm.layers import convert_sync_batchnorm
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from ..utils.memory import keep_freed_memory
from ..utils.seeding import derive_seed, set_seed
from ..utils.validation import did_you_mean, require
from .config import OptimizerConfig, ParallelConfig, RunConfig, ScheduleConfig, TrainConfig
from .runs import recorded_attentions, require_attentions
from .state import is_sharded

# Optimizers of torch that can update all parameters by one operator.
FUSED_OPTIMIZERS: tuple[Any, ...] = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
# Its steps keep the learning rate of the first parameter group for all.
WITHOUT_GROUP_RATES = ("radamlegacy",)
# Schedules that are functions of the step.
SCHEDULES = ("cosine", "multistep", "poly", "step", "tanh")


def join_restarted_job(timeout: timedelta | None = None, backend: str | None = None) -> None:
    """Connect the processes of a job that torchrun has restarted.

    The store in which they find each other is that of the former attempt, with the addresses of processes that have
    ended. Under another prefix, they do not see these.

    Args:
        timeout: How long they wait for each other; None = torch's default.
        backend: How they communicate; None = nccl with GPUs, gloo without.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or torch.distributed.is_initialized():
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(os.environ["MASTER_ADDR"], port, world_size, is_master=False)
    prefixed = torch.distributed.PrefixStore(f"attempt_{attempt}", store)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    torch.distributed.init_process_group(backend, timeout=timeout, store=prefixed, rank=rank, world_size=world_size)


@contextmanager
def cpu_process_group(timeout: timedelta) -> Iterator[torch.distributed.ProcessGroup | None]:
    """A context with a group of all processes of torchrun, for tensors on CPUs; None for a process alone.

    Args:
        timeout: How long they wait for each other.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    join_restarted_job(timeout, "gloo")
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", timeout=timeout)
    try:
        yield torch.distributed.group.WORLD
    finally:
        torch.distributed.destroy_process_group()


def make_accelerator(precision: str, timeout: timedelta | None = None, **options: Any) -> Accelerator:
    """Return an accelerator for one process or many, as launched.

    Args:
        precision: Mixed precision: no, bf16 or fp16.
        timeout: How long processes wait for each other; None = torch's default.
        **options: Arguments of accelerate's Accelerator.
    """
    join_restarted_job(timeout)
    if timeout is not None:
        options["kwargs_handlers"] = [InitProcessGroupKwargs(timeout=timeout)]
    # Precision is shared by all accelerators of a process; a second run may want another one than the first.
    AcceleratorState._reset_state()
    # Without `cpu`, several processes without a GPU would each work alone, and write over each other's results.
    accelerator = Accelerator(cpu=not torch.accelerator.is_available(), mixed_precision=precision, **options)
    if accelerator.num_processes == 1:
        # An earlier accelerator of this process may have been given another device.
        PartialState().device = None
        PartialState().set_device()
        accelerator.state.device = PartialState().device
    return accelerator


def make_train_accelerator(run: RunConfig, parallel: ParallelConfig) -> Accelerator:
    """Return an accelerator for training."""
    if run.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
    accelerator = make_accelerator(
        run.precision,
        timedelta(minutes=parallel.timeout_minutes),
        gradient_accumulation_steps=run.grad_accum_steps,
        log_with=list(run.trackers) or None,
        project_dir=run.output,
        # timm's schedules are functions of the step, and the loop calls them.
        step_scheduler_with_optimizer=False,
    )
    missing = set(run.trackers) - {str(tracker) for tracker in accelerator.log_with}
    require(not missing, f"run.trackers names {', '.join(sorted(missing))}, which is not installed: pip install it")
    if run.device is not None:
        require(
            accelerator.num_processes == 1,
            "--device chooses the device of one process, but there are several: leave it out",
        )
        # accelerate copies the one to the other at times.
        PartialState().device = accelerator.state.device = resolve_device(run.device)
    check_precision("run.precision", run.precision, accelerator.device)
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    return accelerator


def make_mesh(accelerator: Accelerator, config: TrainConfig, supports_sequence: bool) -> DeviceMesh | None:
    """Return the processes as a mesh with the dimensions `data` and `sequence`; None if no image is shared.

    Consecutive processes share an image.

    Args:
        accelerator: The processes.
        config: The run.
        supports_sequence: Whether images of the task can be shared.
    """
    processes, sequence = accelerator.num_processes, config.parallel.sequence
    if sequence == 1:
        return None
    require(
        supports_sequence,
        "parallel.sequence shares images of classification models between processes, and this task has maps that are "
        "not split: set --parallel.sequence 1",
    )
    require(
        not config.run.compile,
        "run.compile does not compile models whose images are shared between processes: leave it out, or set "
        "--parallel.sequence 1",
    )
    require(
        processes % sequence == 0,
        f"parallel.sequence is {sequence}, but the number of processes is {processes}: start a multiple of {sequence}, "
        f"such as torchrun --nproc_per_node {sequence} -m inlinevit train …",
    )
    ranks, timeout = torch.arange(processes).view(-1, sequence), timedelta(minutes=config.parallel.timeout_minutes)
    # The groups of init_device_mesh would have torch's time-out.
    groups: list[Any] = [
        torch.distributed.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)[0] for rows in (ranks.T, ranks)
    ]
    return DeviceMesh.from_group(groups, accelerator.device.type, mesh=ranks, mesh_dim_names=("data", "sequence"))


def check_precision(option: str, precision: str, device: torch.device) -> None:
    """Refuse a precision in which accelerate would compute in full precision without a warning."""
    require(precision != "fp16" or device.type != "cpu", f"{option} fp16 needs a GPU: choose bf16, or no")


def resolve_device(name: str | None) -> torch.device:
    """Return the device that `--device` names, such as cpu or cuda; None = the best there is."""
    if name is None:
        return PartialState().device
    try:
        device = torch.device(name)
        # The meta device, for one, has no numbers.
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        problem = " ".join(str(error).split())[:100]
        raise ValueError(f"device {name!r} cannot be used here ({problem}): choose another one, such as cpu") from error
    return device


def enable_grad_checkpointing(model: Any) -> None:
    """Turn on gradient checkpointing. Some of timm's models have the method, but refuse."""
    try:
        model.set_grad_checkpointing()
    except (AttributeError, AssertionError) as error:
        raise ValueError(f"run.grad_checkpointing: {type(model).__name__} cannot do so, train it without") from error


def convert_batch_norms(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Return the model with synchronised batch norms; the same model if there is one process."""
    if accelerator.num_processes == 1:
        return model
    require(
        accelerator.device.type != "cpu",
        "run.sync_batch_norm needs processes with a GPU each: leave it out, or use one process",
    )
    # timm's own: torch's would lose the activations that timm has in its norms.
    return convert_sync_batchnorm(model)


def build_model(build: Callable[[], nn.Module], run: RunConfig, accelerator: Accelerator) -> nn.Module:
    """Build the model of a run; if it is to be sharded, only the main process has its weights."""
    set_seed(derive_seed(run.seed))
    try:
        return build_on_meta(build) if run.fsdp and not accelerator.is_main_process else build()
    except ValueError:
        # The run that is resumed knows the modules of its attentions.
        require_attentions(run.output, recorded_attentions(Path(run.output)))
        require_attentions("the configuration", run.attention_modules)
        raise


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model without memory for its weights; some of timm's cannot be built so, and get their weights."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            # Weights that are loaded have no effect here: they come from the main process.
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            return build()
    except (RuntimeError, NotImplementedError):
        return build()


def shard_model(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Shard the parameters of a model over the processes, block by block, in place.

    Each process gets memory for its shards only. Their values, and those of buffers, are those of the main process;
    elsewhere, the model may be on the meta device. Our blocks, and nearly all of timm's, are of classes called …Block.
    """
    blocks = [module for module in model.modules() if type(module).__name__.endswith("Block")]
    require(len(blocks) > 0, f"run.fsdp finds no blocks to shard by in {type(model).__name__}: train it without")
    if not torch.distributed.is_initialized():
        # A run that was started on several processes may be resumed on one.
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    is_main = accelerator.is_main_process
    weights: dict[str, Any] = model.state_dict() if is_main else {}
    buffers = dict(model.named_buffers()) if is_main else {}
    model.to("meta")
    # From the inside out, as fully_shard wants it: blocks may hold blocks.
    for block in reversed(blocks):
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    model.to_empty(device=accelerator.device)
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    # State dicts do not have all of them.
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name] if is_main else torch.zeros_like(buffer))
        torch.distributed.broadcast(buffer, src=0)
    return model


def scale_lr(rate: float, optimizer: OptimizerConfig, total_batch: int) -> float:
    """Return a learning rate scaled to the total batch."""
    return rate * total_batch / optimizer.lr_base_size if optimizer.lr_base_size else rate


def make_optimizer(
    model: nn.Module, config: OptimizerConfig, total_batch: int, device: torch.device | str = "cpu"
) -> Optimizer:
    """Return timm's optimizer, with its parameter groups.

    Args:
        model: Its parameters are updated.
        config: The optimizer and its rates.
        total_batch: Images of a step.
        device: Where it is trained. On a CPU, one operator updates all parameters that are not sharded, for optimizers
            that have it; torch would otherwise call about ten for each parameter. Resumed runs keep to what they began
            with.
    """
    known = [str(name) for name in list_optimizers()]
    hint = did_you_mean(config.name, known) or "try adamw, lamb, lion or sgd"
    require(config.name.lower() in known, f"timm has no optimizer called {config.name!r}: {hint}")
    info = get_optimizer_info(config.name.lower())
    require(
        not info.second_order, f"optimizer {config.name} needs second derivatives, which are not computed: try adamw"
    )
    has_factors = bool(config.lr_scales) or config.layer_decay is not None
    require(
        not has_factors or config.name.lower() not in WITHOUT_GROUP_RATES,
        f"optimizer {config.name} has one learning rate for all parameters: leave out optimizer.layer_decay and "
        "optimizer.lr_scales, or choose radam",
    )
    options: dict[str, Any] = {}
    for name, is_known in {"betas": info.has_betas and info.num_betas == 2, "eps": info.has_eps}.items():
        value = vars(config)[name]
        is_given = value != vars(OptimizerConfig)[name]
        require(is_known or not is_given, f"optimizer {config.name} does not take optimizer.{name}: leave it out")
        if is_given or (is_known and "adam" in config.name.lower()):
            options[name] = value
    if torch.device(device).type == "cpu" and info.opt_class in FUSED_OPTIMIZERS and not is_sharded(model):
        options["fused"] = True
    try:
        optimizer = create_optimizer_v2(
            model,
            opt=config.name,
            lr=scale_lr(config.lr, config, total_batch),
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            layer_decay=config.layer_decay,
            **options,
        )
    except (AssertionError, ImportError) as error:
        # Some of timm's optimizers need a GPU, or a package that timm does not install.
        raise ValueError(f"optimizer {config.name} cannot be used here ({error}): choose another one") from error
    scale_group_rates(optimizer, model, config.lr_scales)
    if not is_sharded(model):
        # In checkpoints, so that no state is loaded for another parameter. Those of sharded models have names already.
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for group in optimizer.param_groups:
            group["param_names"] = [names[id(parameter)] for parameter in group["params"]]
    return optimizer


def scale_group_rates(optimizer: Optimizer, model: nn.Module, scales: Mapping[str, float]) -> None:
    """Give the parameters that match a pattern a learning rate of their own, in groups of their own.

    Args:
        optimizer: Before its first step. Its schedule multiplies the rate of a group by the group's `lr_scale`.
        model: Its parameters have the names that patterns stand for.
        scales: Factors by pattern, in which * stands for any letters.

    Raises:
        ValueError: A pattern matches no parameter that is trained, or two match the same one.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    pattern_of: dict[int, str] = {}
    # In the order of their names: that of a dict is not kept in every file, and states are stored in that of groups.
    scales = dict(sorted(scales.items()))
    for pattern in scales:
        found = [key for key, name in names.items() if fnmatchcase(name, pattern)]
        first = dict.fromkeys(name.partition(".")[0] for name in names.values())
        hint = did_you_mean(pattern, names.values()) or f"names begin with {', '.join(first)}"
        require(bool(found), f"optimizer.lr_scales: no parameter that is trained matches {pattern!r}: {hint}")
        for key in found:
            both = f"{pattern_of.get(key)!r} and {pattern!r}"
            require(
                key not in pattern_of,
                f"optimizer.lr_scales: {names[key]} matches {both}: let only one of them match it",
            )
            pattern_of[key] = pattern
    for group in list(optimizer.param_groups):
        parameters = group["params"]
        group["params"] = [one for one in parameters if id(one) not in pattern_of]
        for pattern, scale in scales.items():
            if scaled := [one for one in parameters if pattern_of.get(id(one)) == pattern]:
                rates = {"lr_scale": scale * group.get("lr_scale", 1.0)}
                optimizer.param_groups.append({**group, **rates, "params": scaled})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def make_scheduler(
    optimizer: Optimizer, schedule: ScheduleConfig, rates: OptimizerConfig, total_batch: int, steps_per_epoch: int
) -> tuple[Scheduler, int]:
    """Return timm's schedule, which is a function of the step, and the number of steps."""
    hint = did_you_mean(schedule.name, SCHEDULES) or f"try {', '.join(SCHEDULES)}"
    require(schedule.name in SCHEDULES, f"there is no schedule called {schedule.name!r}: {hint}")
    unit, length = (steps_per_epoch if schedule.steps is None else 1), schedule.length
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=schedule.name,
        num_epochs=length,
        warmup_epochs=cast(int, schedule.warmup),  # timm takes parts of an epoch, too
        cooldown_epochs=schedule.cooldown,
        decay_epochs=schedule.milestones[0] if schedule.milestones else length,
        decay_milestones=schedule.milestones,
        decay_rate=schedule.decay_rate,
        min_lr=scale_lr(schedule.min_lr, rates, total_batch),
        warmup_lr=scale_lr(schedule.warmup_lr, rates, total_batch),
        step_on_epochs=False,
        updates_per_epoch=unit,
    )
    assert scheduler is not None
    return scheduler, unit * (length + schedule.cooldown)


def make_ema(model: nn.Module, run: RunConfig, total_batch: int) -> ModelEmaV3 | None:
    """Return the exponential moving average of a model's weights; None if none is configured."""
    if run.ema_decay is None:
        return None
    power = total_batch / run.ema_batch_size if run.ema_batch_size else 1.0
    return ModelEmaV3(model, decay=run.ema_decay**power)
