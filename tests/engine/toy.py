"""A small job for the training loop, and a server that runs it in processes of their own, which tests may kill.

Starting Python and importing torch takes seconds, so `serve` imports once and forks a process for each run.
"""

import atexit
import importlib
import json
import os
import random
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

import inlinevit  # noqa: F401
from inlinevit.cli.errors import lost_process
from inlinevit.data.batch_plan import BatchPlan
from inlinevit.data.loader import EvalLoader, ShuffledLoader
from inlinevit.data.samplers import ShardedSampler
from inlinevit.engine import checkpoints
from inlinevit.engine.config import OptimizerConfig, ParallelConfig, RunConfig, ScheduleConfig, TrainConfig
from inlinevit.engine.trainer import Diverged, Stopped, Trainer
from inlinevit.utils import atomic as files

CLASSES = 3
EVALUATION_SAMPLES = 7
MODELS = {
    "inline_deit_tiny": dict(img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2),
    "inline_pvt_tiny": dict(img_size=32, embed_dims=(8, 16, 16, 16), depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 2)),
    "inline_swin_tiny": dict(img_size=32, embed_dim=8, depths=(1, 2, 1, 1), num_heads=(1, 2, 2, 2)),
    "inline_cswin_tiny": dict(img_size=32, embed_dim=8, depths=(1, 1, 1, 1), num_heads=(2, 2, 2, 2)),
}


@dataclass
class ToyConfig:
    """What a toy run may be told."""

    model: str = "mlp"
    dropout: float = 0.3
    batch_norm: bool = True
    samples: int = 52
    batch_size: int = 4
    workers: int = 0
    # Side of the images of a model; 0 = that for which it is made.
    size: int = 0
    # Seconds that a step takes at least.
    pause: float = 0.0
    greater_is_better: bool = False
    # What evaluations give, one after another; the rest are measured.
    metrics: list[float] = field(default_factory=list)
    # What happens in a step: {"3": "SIGTERM"}, {"5": "nan"}, counted by calls of the loss in this process.
    events: dict[str, str] = field(default_factory=dict)
    # Bytes that a file may have; 0 = any number.
    file_limit: int = 0
    # Where the process kills itself: "write:7" is half-way through the 7th file of checkpoints.
    kill: str = ""


def settings(output: Path | str, **changes: Any) -> dict[str, Any]:
    """The settings of a toy run as JSON; a change is given as run__keep_checkpoints=2, toy__workers=1."""
    plain: dict[str, Any] = {
        "optimizer": {"lr": 0.02, "lr_base_size": 0, "clip_grad": 1.0, "weight_decay": 0.05},
        "schedule": {"epochs": 4, "warmup": 1},
        "run": {
            "output": str(output),
            "grad_accum_steps": 2,
            "ema_decay": 0.9,
            "checkpoint_steps": 5,
            "log_every": 4,
        },
        "parallel": {},
        "toy": {},
    }
    for name, value in changes.items():
        part, key = name.split("__")
        plain[part][key] = value
    return plain


def make_trainer(plain: dict[str, Any]) -> Trainer:
    """A trainer of these settings."""
    config = TrainConfig(
        OptimizerConfig(**plain["optimizer"]),
        ScheduleConfig(**plain["schedule"]),
        RunConfig(**plain["run"]),
        ParallelConfig(**plain["parallel"]),
    )
    return Trainer(ToyTask(ToyConfig(**plain["toy"]), config.run.seed), config)


def make_model(name: str, **options: Any) -> nn.Module:
    """A very small model of one of our families."""
    return timm.create_model(name, num_classes=CLASSES, **{**MODELS[name], **options})


class Mlp(nn.Module):
    """Dropout draws random numbers, and the batch norm has buffers."""

    def __init__(self, dropout: float, batch_norm: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16) if batch_norm else nn.LayerNorm(16)
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(F.gelu(self.norm(self.fc1(x)))))


class ToySamples:
    """Samples that are random, but for the first part of each; augmented from all three generators."""

    def __init__(self, length: int, shape: tuple[int, ...], augment: bool) -> None:
        generator = torch.Generator().manual_seed(length)
        self.inputs = torch.randn(length, *shape, generator=generator)
        self.labels = torch.randint(CLASSES, (length,), generator=generator)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = random.random() + np.random.rand() + torch.rand(()).item() if self.augment else 0.0
        return self.inputs[index] + 0.2 * noise, self.labels[index]


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([sample[0] for sample in samples]), torch.stack([sample[1] for sample in samples])


class ToyTask:
    """A Task for the loop."""

    command = ""
    metric = "error"
    batch_multiple = 1
    supports_sequence = True

    def __init__(self, config: ToyConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        self.batch_size, self.workers = config.batch_size, config.workers
        self.greater_is_better = config.greater_is_better
        size = config.size or (MODELS[config.model]["img_size"] if config.model in MODELS else 0)
        self.shape: tuple[int, ...] = (3, size, size) if size else (6,)
        self.calls = 0
        self.metrics = list(config.metrics)

    def build_model(self) -> nn.Module:
        if self.config.model == "mlp":
            return Mlp(self.config.dropout, self.config.batch_norm)
        return make_model(self.config.model)

    def train_loader(self, plan: BatchPlan) -> ShuffledLoader:
        samples = ToySamples(self.config.samples, self.shape, augment=True)
        order = ShardedSampler(len(samples), plan, seed=self.seed)
        return ShuffledLoader(samples, order, collate=collate)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(self.config.pause)
        self.calls += 1
        event = self.config.events.get(str(self.calls))
        inputs, labels = batch
        loss = F.cross_entropy(model(inputs).float(), labels)
        if event == "nan" or event == f"nan of rank {os.environ.get('RANK')}":
            return loss * float("nan")
        if event == "infinite gradient":
            # The root of nothing is nothing, but steep.
            return loss + (loss - loss.detach()).sqrt()
        for name in (event or "").split() if "SIG" in (event or "") else ():
            os.kill(os.getpid(), signal.Signals[name])
        return loss

    @torch.no_grad()
    def compute_metrics(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        data = EvalLoader(
            ToySamples(EVALUATION_SAMPLES, self.shape, augment=False),
            batch_size=2,
            workers=0,
            collate=collate,
            process=accelerator.process_index,
            processes=accelerator.num_processes,
        )
        total = torch.zeros(2)
        for inputs, labels in data:
            loss = F.cross_entropy(model(inputs).float(), labels, reduction="sum")
            total += torch.tensor([loss.item(), len(labels)])
        loss, count = accelerator.reduce(total, "sum").tolist()
        return {"error": self.metrics.pop(0) if self.metrics else loss / count, "samples": count}

    def metadata(self) -> dict[str, Any]:
        return {"classes.json": list(range(CLASSES))}

    def describe(self) -> str:
        return "a toy"


def kill_at(place: str) -> None:
    """Have this process killed at a place in the writing of checkpoints: "write:7" is the 7th file."""
    name, _, number = place.partition(":")
    left = int(number)

    def countdown() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(path: Path, content: bytes) -> None:
        path.write_bytes(content[: len(content) // 2])
        countdown()
        files.write_bytes(path, content)

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            countdown()
            return function(*arguments, **options)

        return counted

    if name == "write":
        checkpoints.write_bytes = write
    elif name == "rename":
        checkpoints.os.rename = before(os.rename)
    elif name == "best":
        checkpoints.CheckpointFolder.mark_best = before(checkpoints.CheckpointFolder.mark_best)
    elif name == "evaluation":
        ToyTask.compute_metrics = before(ToyTask.compute_metrics)
    elif name == "noted":
        checkpoints.CheckpointFolder.save_evaluation = before(checkpoints.CheckpointFolder.save_evaluation)
    elif name == "prune":
        checkpoints.CheckpointFolder._prune = before(checkpoints.CheckpointFolder._prune)
    else:
        raise ValueError(name)


def run(plain: dict[str, Any]) -> int:
    """Train, and return an exit code."""
    torch.set_num_threads(1)
    config = ToyConfig(**plain["toy"])
    if config.kill:
        kill_at(config.kill)
    if config.file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (config.file_limit, config.file_limit))
    try:
        trainer = make_trainer(plain)
        metrics = trainer.run()
        trainer.accelerator.end_training()
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return 128 + stopped.signal_number
    except (Diverged, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if not (problem := lost_process(str(error))):
            raise
        print(f"error: {problem}", file=sys.stderr)
        return 1
    print(f"done: {json.dumps(metrics)}", file=sys.stderr)
    return 0


def run_script(settings: dict[str, Any]) -> int:
    """Run code with arguments, as `python -c CODE ARGUMENTS` does, and return its exit code."""
    torch.set_num_threads(1)
    sys.argv = ["-c", *settings["arguments"]]
    try:
        exec(compile(settings["code"], "<script>", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def leave(code: int) -> NoReturn:
    """End a forked process as Python would, but without the second or two that it takes to tear down all modules."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve(jobs: dict[str, Callable[[dict[str, Any]], int]]) -> None:
    """Fork processes for each line of stdin and tell their ids; then, when all have ended, how.

    A line is {"job": …, "settings": …, "processes": …, "modules": …, "output": file for what they print}. Modules are
    imported before the processes are forked.
    """
    for line in sys.stdin:
        request = json.loads(line)
        for module in request["modules"]:
            importlib.import_module(module)
        port, processes = free_port(), request["processes"]
        ids = []
        for rank in range(processes):
            identity = os.fork()
            if identity == 0:
                # A session of its own: a test can kill it with its workers, and nothing else.
                os.setsid()
                stream = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                for descriptor in (1, 2):
                    os.dup2(stream, descriptor)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                if processes > 1:
                    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
                    os.environ |= {name: str(value) for name, value in names.items()}
                    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                try:
                    leave(jobs[request["job"]](request["settings"]))
                except BaseException:
                    traceback.print_exc()
                    leave(1)
            ids.append(identity)
        print(json.dumps(ids), flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(identity, 0)[1]) for identity in ids]
        print(json.dumps(codes), flush=True)


def main() -> None:
    """`python toy.py SETTINGS.json` trains; `python toy.py` serves."""
    if len(sys.argv) > 1:
        sys.exit(run(json.loads(Path(sys.argv[1]).read_text())))
    from tests.engine.sharding import shard_and_train
    from tests.parallel.checks import check_sequence

    serve({"train": run, "script": run_script, "shard": shard_and_train, "sequence": check_sequence})


if __name__ == "__main__":
    main()
