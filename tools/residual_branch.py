"""Measure the local residual of InLine attention while a model is trained: docs/reproduce/residual.json.

python tools/residual_branch.py path/to/cifar10 --output docs/reproduce/residual.json

It trains the row "InLine, identity" of `inlinevit reproduce` (seed 0) and measures some of its steps:

residual_share: root mean square of what the local residual adds, over that of attention, on the map.
dynamic_share: part of the mean square of the 3×3 kernels that is their variance over the images of the batch.
gradients: norm of the gradient over the norm of the weights.
updates: norm of the change of the weights over the norm of the weights.

All are means over the blocks; W₁ and W₂ are the layers that make the kernels.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from inlinevit import ops
from inlinevit.engine.trainer import Trainer
from inlinevit.experiments.reproduce.ablations import INLINE
from inlinevit.experiments.reproduce.design import Run
from inlinevit.experiments.reproduce.studies import run_config
from inlinevit.layers import InLineAttention
from inlinevit.tasks.classification.config import ClassificationConfig
from inlinevit.tasks.classification.task import Classification
from inlinevit.utils.atomic import atomic_write_json

CELL = INLINE["identity"]
# Weights of a block by the names that the table has.
WEIGHTS = {
    "W₂": "attn.local_residual.fc2.weight",
    "bias of W₂": "attn.local_residual.fc2.bias",
    "W₁": "attn.local_residual.fc1.weight",
    "qkv": "attn.qkv.weight",
    "MLP": "mlp.fc1.weight",
}


class MeasuredTrainer(Trainer):
    """A trainer that measures the steps `measured`; `rows` are the results."""

    measured: Sequence[int] = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rows: list[dict[str, Any]] = []

    def train_step(self, step: int, batches: Iterator[Any]) -> Tensor:
        """See Trainer.train_step."""
        if step not in self.measured:
            return super().train_step(step, batches)
        found: dict[str, list[float]] = defaultdict(list)
        before = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        with ExitStack() as stack:
            for module in self.model.modules():
                if isinstance(module, InLineAttention):
                    stack.enter_context(shares_measured(module, found))
            for name, parameter in self.model.named_parameters():
                hook = partial(add_gradient, name, found)
                stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
            numbers = super().train_step(step, batches)
        for name, parameter in self.model.named_parameters():
            if word := word_of(name):
                change = (parameter.detach() - before[name]).norm() / before[name].norm()
                found[f"updates/{word}"].append(change.item())
        means = {name: mean(values) for name, values in found.items()}
        row: dict[str, Any] = {"step": step, "lr": self.learning_rate}
        row |= {name: means[name] for name in ("residual_share", "dynamic_share")}
        row |= {kind: {word: means[f"{kind}/{word}"] for word in WEIGHTS} for kind in ("gradients", "updates")}
        self.rows.append(row)
        return numbers


def word_of(name: str) -> str | None:
    """Return the word in WEIGHTS of a parameter; None if it is not among them."""
    return next((word for word, suffix in WEIGHTS.items() if name.endswith(suffix)), None)


def add_gradient(name: str, found: dict[str, list[float]], parameter: Tensor) -> None:
    """Add the relative norm of a parameter's gradient to what was found."""
    if (word := word_of(name)) and parameter.grad is not None:
        found[f"gradients/{word}"].append((parameter.grad.norm() / parameter.detach().norm()).item())


@contextmanager
def shares_measured(attention: InLineAttention, found: dict[str, list[float]]) -> Iterator[None]:
    """Add the shares of an attention without prefix tokens to what was found, in its next forward pass."""
    assert attention.local_residual is not None
    seen: dict[str, Any] = {}

    def keep_input(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen["feat_size"] = args[1]

    def keep_values(module: nn.Module, args: tuple[Any, ...], qkv: Tensor) -> None:
        seen["v"] = qkv.detach().chunk(3, dim=-1)[2].unsqueeze(1)

    def keep_kernels(module: nn.Module, args: tuple[Any, ...], kernels: Tensor) -> None:
        seen["kernels"] = kernels.detach()

    def measure(module: nn.Module, args: tuple[Any, ...]) -> None:
        kernels = seen["kernels"]
        added = ops.local_residual(seen["v"], kernels, seen["feat_size"]).squeeze(1)
        attended = args[0].detach() - added
        found["residual_share"].append((added.square().mean() / attended.square().mean()).sqrt().item())
        found["dynamic_share"].append((kernels.var(dim=0).mean() / kernels.square().mean()).item())

    with ExitStack() as stack:
        stack.callback(attention.register_forward_pre_hook(keep_input).remove)
        stack.callback(attention.qkv.register_forward_hook(keep_values).remove)
        stack.callback(attention.local_residual.register_forward_hook(keep_kernels).remove)
        stack.callback(attention.proj.register_forward_pre_hook(measure).remove)
        yield


def measure(data: str, lr: float, steps: int | None) -> dict[str, Any]:
    """Train the model and return the record."""
    with tempfile.TemporaryDirectory() as folder:
        config: ClassificationConfig = run_config(Run(CELL, 0), data=data, output=folder, lr=lr, steps=steps)
        trainer = MeasuredTrainer(Classification(config), config)
        last = trainer.total_steps - 1
        trainer.measured = sorted({step for step in (0, 100, 390, 1000) if step < last} | {last})
        metrics = trainer.run()
    return {"cell": CELL.key, "label": CELL.label, "lr": lr, "top1": metrics["top1"], "rows": trainer.rows}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder of CIFAR-10's train.tar and test.tar, or of the folders train and test")
    parser.add_argument("--lr", type=float, default=0.002, help="learning rate: the one that was chosen for this row")
    parser.add_argument("--steps", type=int, help="length of the run; by default that of the recipe")
    parser.add_argument("--output", type=Path, help="file of the record")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = measure(options.data, options.lr, options.steps)
    print(json.dumps(record, indent=2, ensure_ascii=False))
    if options.output is not None:
        atomic_write_json(options.output, record)


if __name__ == "__main__":
    main()
