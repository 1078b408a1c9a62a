"""Our models under torch's fully_shard, against the same models whole. To be run by every process of a group."""

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from inlinevit.engine.checkpoints import CheckpointFolder, Progress, find_damage
from inlinevit.engine.distributed import run_on_all, run_on_main
from inlinevit.engine.state import get_weights, is_sharded, restore, save_shards
from inlinevit.layers import Block
from inlinevit.utils.seeding import set_seed
from tests.engine.toy import CLASSES, MODELS, make_model

STEPS = 3


def shard(model: nn.Module) -> nn.Module:
    """Shard every block, and the rest."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    assert len(blocks) > 1
    for block in blocks:
        fully_shard(block)
    return fully_shard(model)


def make_optimizer(model: nn.Module) -> Any:
    """An optimizer as accelerate holds it."""
    return SimpleNamespace(optimizer=create_optimizer_v2(model, opt="adamw", lr=0.01, weight_decay=0.05))


def train_step(model: nn.Module, optimizer: Any, images: Tensor, labels: Tensor) -> Tensor:
    """One step; returns the loss."""
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert math.isfinite(norm)
    optimizer.optimizer.step()
    optimizer.optimizer.zero_grad()
    return loss.detach()


def assert_close(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Two dicts of tensors are alike."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-6, atol=1e-9, msg=lambda text, name=name: name + text)


def shard_and_train(plain: dict[str, Any]) -> int:
    """Train a model whole and sharded, and see that nothing differs."""
    torch.set_num_threads(1)
    accelerator, name = Accelerator(cpu=True), plain["toy"]["model"]
    set_seed(0)
    # In double precision, so that rounding hides no difference and makes none.
    whole = make_model(name).double()
    sharded = shard(copy.deepcopy(whole))
    assert is_sharded(sharded)
    assert not is_sharded(whole)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    start = get_weights(whole)
    optimizers = make_optimizer(whole), make_optimizer(sharded)
    size, share = MODELS[name]["img_size"], slice(accelerator.process_index, None, accelerator.num_processes)
    for _ in range(STEPS):
        images, labels = torch.randn(4, 3, size, size).double(), torch.randint(CLASSES, (4,))
        loss = train_step(whole, optimizers[0], images, labels)
        part = train_step(sharded, optimizers[1], images[share], labels[share])
        torch.testing.assert_close(accelerator.reduce(part, "mean"), loss, rtol=1e-5, atol=0)

    # Whole tensors under the names of the bare model, in the process that exports them.
    weights = get_weights(sharded)
    if accelerator.is_main_process:
        assert_close(weights, get_weights(whole))
        assert not torch.equal(weights["head.weight"], start["head.weight"])
        assert all(type(value) is Tensor for value in weights.values())

    # What all processes write together, they read.
    checkpoints = CheckpointFolder(Path(plain["run"]["output"]))
    aside = run_on_main(accelerator, lambda: checkpoints.prepare(STEPS))
    parts = run_on_all(accelerator, lambda: save_shards(aside, sharded, optimizers[1], accelerator))
    written = {name: entry for entries, _ in parts for name, entry in entries.items()}
    assert len(written) == accelerator.num_processes
    path = run_on_main(accelerator, lambda: checkpoints.commit(Progress(step=STEPS), parts[0][1], written))
    assert find_damage(path) is None
    again = shard(make_model(name).double())
    again_optimizer = make_optimizer(again)
    restore(path, again, None, again_optimizer, accelerator)
    copied = get_weights(again)
    if accelerator.is_main_process:
        assert all(torch.equal(copied[name], weights[name]) for name in weights)
    assert again_optimizer.optimizer.param_groups[0]["betas"] == optimizers[1].optimizer.param_groups[0]["betas"]
    losses = [
        train_step(model, optimizer, images[share], labels[share])
        for model, optimizer in ((sharded, optimizers[1]), (again, again_optimizer))
    ]
    assert torch.equal(losses[0], losses[1])
    ours, theirs = get_weights(again), get_weights(sharded)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    # Why averaged weights are refused with sharding.
    assert isinstance(sharded, FSDPModule)
    with pytest.raises(AssertionError, match="does not support deepcopy"):
        copy.deepcopy(sharded)
    print("sharded as whole")
    accelerator.end_training()
    return 0
