"""What a training run can be told, whatever its task. The command line and the recipes are these classes."""

import typing
from argparse import ArgumentError
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast

from ..utils.files import read_yaml
from ..utils.validation import check_fields, require

AnyConfig = TypeVar("AnyConfig")

# Larger values are mistakes; docs/training.md lists these limits.
MOST_STEPS = 10**9
MOST_IMAGES = 10**12
MOST_WORKERS = 1024


@dataclass
class OptimizerConfig:
    """How weights are updated."""

    name: str = "adamw"
    """Any of timm's optimizers."""
    lr: float = 5e-4
    """Learning rate for a total batch of lr_base_size; the rate used grows in proportion to the total batch."""
    lr_base_size: int = 512
    """The total batch that the learning rates are given for; 0 = they are absolute."""
    weight_decay: float = 0.05
    """Not for norms, biases, positions, class tokens and relative position tables."""
    betas: tuple[float, float] = (0.9, 0.999)
    """For optimizers of Adam's family."""
    eps: float = 1e-8
    """For optimizers of Adam's family."""
    momentum: float = 0.9
    """For optimizers that have one."""
    layer_decay: float | None = None
    """Learning rates fall by this factor from layer to layer, from the head down to the first one."""
    clip_grad: float | None = None
    """Largest norm of the gradients."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "optimizer",
            lr_base_size=MOST_STEPS,
            eps=1,
        )
        for name in ("lr", "weight_decay", "eps"):
            value = vars(self)[name]
            require(0 <= value < inf, f"optimizer.{name} is {value}: it should be finite and not negative")
        for name, values in {"betas": self.betas, "momentum": (self.momentum,)}.items():
            require(all(0 <= value < 1 for value in values), f"optimizer.{name} should be from 0 to below 1")
        require(self.layer_decay is None or 0 < self.layer_decay <= 1, "optimizer.layer_decay should be in 0 ... 1")
        require(self.lr_base_size >= 0, f"optimizer.lr_base_size is {self.lr_base_size}: 0 makes rates absolute")
        require(self.clip_grad is None or self.clip_grad > 0, "optimizer.clip_grad should be above 0, or null for none")


@dataclass
class ScheduleConfig:
    """How long to train, and how the learning rate goes. Lengths are in epochs, or in steps if `steps` is given."""

    name: str = "cosine"
    """Any of timm's schedules that are functions of the step: cosine, tanh, poly, step, multistep."""
    epochs: int = 300
    """Length of the schedule, without cool-down."""
    steps: int | None = None
    """Train for so many steps instead of epochs; every other length here, and run.eval_every, then counts steps."""
    warmup: float = 20
    """The learning rate rises so long."""
    cooldown: int = 0
    """Time at the end with the lowest learning rate."""
    min_lr: float = 5e-6
    """Learning rate at the end; it grows with the total batch as the learning rate does."""
    warmup_lr: float = 5e-7
    """Learning rate at the beginning; it grows with the total batch as the learning rate does."""
    milestones: list[int] = field(default_factory=list)
    """For multistep, where the rate falls; for step, the first number is how often."""
    decay_rate: float = 0.1
    """For step and multistep, the factor by which the rate falls; for poly, the power."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "schedule",
            epochs=MOST_STEPS,
            steps=MOST_STEPS,
            warmup=MOST_STEPS,
            cooldown=MOST_STEPS,
            milestones=MOST_STEPS,
            decay_rate=100,
        )
        length = self.epochs if self.steps is None else self.steps
        require(length > 0, "schedule.epochs (or schedule.steps) should be at least 1")
        require(
            0 <= self.warmup <= length,
            f"schedule.warmup is {self.warmup:g}: it should be from 0 to {length}, the length of the schedule",
        )
        for name in ("cooldown", "min_lr", "warmup_lr"):
            value = vars(self)[name]
            require(0 <= value < inf, f"schedule.{name} is {value}: it should be finite and not negative")
        require(all(place > 0 for place in self.milestones), "schedule.milestones should hold numbers above 0")
        require(self.decay_rate > 0, f"schedule.decay_rate is {self.decay_rate}: it should be above 0")


@dataclass
class RunConfig:
    """Where a run leaves its results, and how it uses the machine."""

    output: str = "runs/latest"
    """Folder of the results: config.yaml, metrics.jsonl, checkpoints, model.safetensors."""
    seed: int = 0
    """Decides initial weights, order of the data and augmentation."""
    resume: str = "auto"
    """"auto" goes on from the newest good checkpoint in `output`, if there is one; "never" begins anew; or the folder
    of a checkpoint: checkpoints of later steps in `output` are then replaced."""
    checkpoint_minutes: float = 10.0
    """Minutes between checkpoints; there is always one at an evaluation and, unless the schedule counts steps, at the
    end of an epoch."""
    checkpoint_steps: int | None = None
    """Steps between checkpoints."""
    keep_checkpoints: int = 2
    """How many of the last checkpoints to keep, beside the best."""
    eval_every: int | None = None
    """Epochs (or steps, if the schedule counts steps) between evaluations; null = after each epoch."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Half precision for what can bear it."""
    grad_accum_steps: int = 1
    """Batches whose gradients are added up before a step."""
    compile: bool = False
    """Compile the model with torch.compile."""
    grad_checkpointing: bool = False
    """Compute activations twice instead of keeping them: slower, but needs less memory."""
    ema_decay: float | None = None
    """Also keep weights averaged with this decay a step, and evaluate and export those."""
    ema_batch_size: int = 0
    """The total batch that ema_decay is given for: the decay used is its power (total batch / ema_batch_size); 0 = it
    is used as it is."""
    deterministic: bool = False
    """On a GPU, choose algorithms that give the same bits each time, at some cost; a CPU does so anyway."""
    sync_batch_norm: bool = False
    """Have batch norms see the images of all processes: for models that have some, and few images a process."""
    fsdp: bool = False
    """Shard parameters, gradients and optimizer states over the processes."""
    trackers: list[str] = field(default_factory=list)
    """Any of accelerate's: tensorboard, wandb, ...."""
    log_every: int = 50
    """Steps between lines in metrics.jsonl."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "run",
            seed=2**63,
            checkpoint_minutes=MOST_STEPS,
            checkpoint_steps=MOST_STEPS,
            keep_checkpoints=MOST_STEPS,
            eval_every=MOST_STEPS,
            grad_accum_steps=MOST_STEPS,
            ema_batch_size=MOST_STEPS,
            log_every=MOST_STEPS,
        )
        require(self.seed >= 0, f"run.seed is {self.seed}: it should not be negative")
        for name in ("keep_checkpoints", "eval_every", "grad_accum_steps", "log_every", "checkpoint_steps"):
            value = vars(self)[name]
            require(value is None or value > 0, f"run.{name} is {value}: it should be at least 1")
        require(self.ema_decay is None or 0 <= self.ema_decay < 1, "run.ema_decay should be from 0 to below 1")
        require(
            self.ema_decay is None or not self.fsdp,
            "run.fsdp cannot average sharded weights: set --run.ema_decay null, or train without --run.fsdp",
        )
        require(self.ema_batch_size >= 0, f"run.ema_batch_size is {self.ema_batch_size}: it should not be negative")
        require(self.checkpoint_minutes >= 0, "run.checkpoint_minutes should not be negative")


@dataclass
class SplitDataConfig:
    """What data for dense tasks have in common: they come in splits, and are evaluated one image at a time."""

    max_train_samples: int | None = None
    """Train on so many images, the first of the split; null = all."""
    max_eval_samples: int | None = None
    """Evaluate on so many images, the first of the split; null = all."""
    batch_size: int = 2
    """Images in a batch of one process. Evaluation takes one image at a time."""
    workers: int = 2
    """Processes that read images, for each training process; 0 = the training process itself."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "data",
            max_train_samples=MOST_IMAGES,
            max_eval_samples=MOST_IMAGES,
            batch_size=MOST_IMAGES,
            workers=MOST_WORKERS,
        )
        require(self.batch_size > 0, f"data.batch_size is {self.batch_size}: it should be at least 1")
        require(self.workers >= 0, f"data.workers is {self.workers}: it should not be negative")
        for name in ("max_train_samples", "max_eval_samples"):
            value = vars(self)[name]
            require(value is None or value > 0, f"data.{name} is {value}: it should be at least 1")


@dataclass
class DataOptions:
    """Which images to evaluate on, where they are not those of the training run."""

    # Fields that name other data, to which the rest of what the run says of its data does not apply.
    places: ClassVar[tuple[str, ...]] = ()

    path: str | None = None
    """The data; null = as in the run."""
    eval_split: str | None = None
    """The split to evaluate on; null = as in the run."""
    workers: int | None = None
    """Processes that read images; null = as in the run."""

    def said(self) -> dict[str, Any]:
        """The fields of a configuration that are to be others than in the run."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def applied_to(self, run: AnyConfig | None, default: AnyConfig) -> AnyConfig:
        """The data of a run, except for the fields that are given here; its own checks refuse what makes no sense.

        Args:
            run: The run's configuration of its data; None = there is no run.
            default: What applies instead if there is no run, or other data are named.
        """
        said = self.said()
        is_elsewhere = run is None or bool(said.keys() & set(self.places))
        return cast(AnyConfig, replace(cast(Any, default if is_elsewhere else run), **said))


@dataclass
class SplitDataOptions(DataOptions):
    """Which images to evaluate on, where they are not those of the training run."""

    max_eval_samples: int | Literal["all"] | None = None
    """Evaluate on so many images, the first of the split, or on all; null = as in the run."""

    def said(self) -> dict[str, Any]:
        """See DataOptions.said."""
        return {
            name: None if value == "all" and name == "max_eval_samples" else value
            for name, value in super().said().items()
        }


@dataclass
class TrainConfig:
    """What the loop needs to know. A task adds its data and its model."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    run: RunConfig = field(default_factory=RunConfig)


# What may change when a run is resumed, because the finished weights do not depend on it.
FREE_ON_RESUME = (
    "data.path",
    "data.eval_path",
    "data.eval_annotations",
    "data.eval_folder",
    "data.labels",
    "data.root",
    "data.train_annotations",
    "data.train_folder",
    "data.workers",
    "run.checkpoint_minutes",
    "run.checkpoint_steps",
    "run.keep_checkpoints",
    "run.log_every",
    "run.output",
    "run.resume",
    "run.trackers",
)

# Defaults that older versions have written into config.yaml, which are null today.
FORMER_DEFAULTS = {"data.train_split": "train", "data.eval_split": "validation"}

# What may change if it comes to the same total batch.
BATCH_SETTINGS = ("data.batch_size", "run.grad_accum_steps")


def to_plain(config: Any) -> dict[str, Any]:
    """A configuration as dicts, lists, numbers and words, for YAML and JSON."""
    return asdict(config, dict_factory=lambda pairs: {name: _plain(value) for name, value in pairs})


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def config_from_dict(kind: type[AnyConfig], values: Any) -> AnyConfig:
    """Return a configuration with these values, parsed as recipes and options are.

    Args:
        kind: Its dataclass; fields may be dataclasses themselves.
        values: Its fields by name, as they come out of a file; those that are missing keep their defaults.

    Raises:
        ValueError: A field is unknown, or its value is not valid; the message is one sentence without the file.
    """
    # Here, because most commands that import this module parse no file.
    from jsonargparse import ArgumentParser

    _require_sections(kind, values)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind)
    try:
        parsed = parser.instantiate(parser.parse_object(values))
    except ArgumentError as error:
        raise ValueError(" ".join(str(error).split())[:300]) from error
    return kind(**vars(parsed))


def _require_sections(kind: Any, values: Any) -> None:
    """Refuse other values than dicts for dataclasses: jsonargparse takes text there for the name of a file."""
    if not isinstance(values, dict):
        raise ValueError(f"expected the fields of {kind.__name__}, but found {values!r:.100}")
    for name, hint in typing.get_type_hints(kind).items():
        if is_dataclass(hint) and name in values:
            _require_sections(hint, values[name])


def flattened(plain: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A plain configuration as a single dict: {"run.seed": 0, …}."""
    flat: dict[str, Any] = {}
    for name, value in plain.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def read_plain(file: Path) -> dict[str, Any]:
    """The plain configuration that a run has left."""
    try:
        plain = read_yaml(file)
    except (OSError, ValueError):
        plain = None
    if not isinstance(plain, dict):
        raise ValueError(
            f"{file} does not tell the settings of the checkpoints beside it: restore it, name one of them with "
            "--run.resume, or begin anew with --run.resume never"
        )
    return plain


def check_unchanged(before: dict[str, Any], now: dict[str, Any], is_same_batch: bool = False) -> None:
    """Refuse to resume a run under settings that would make it another one.

    Args:
        before: The plain configuration that it was started with.
        now: The plain configuration that it is to be resumed with.
        is_same_batch: Whether the settings come to the same total batch as they are; how it is dealt out may change.
    """
    old, new = flattened(before), flattened(now)
    free = {*FREE_ON_RESUME, *(BATCH_SETTINGS if is_same_batch else ())}
    for name, former in FORMER_DEFAULTS.items():
        if old.get(name) == former and name in new and new[name] is None:
            old[name] = None
    changed = [
        f"{name} was {old.get(name)} and is {new.get(name)}"
        for name in sorted(old.keys() | new.keys())
        if name not in free and old.get(name) != new.get(name)
    ]
    require(
        not changed,
        f"{now['run']['output']} holds a run with other settings ({'; '.join(changed)}): choose another --run.output, "
        "or start over with --run.resume never",
    )
