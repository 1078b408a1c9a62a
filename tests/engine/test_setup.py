"""Schedules, parameter groups, averages and sharding, against their formulas."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import timm
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from inlinevit.engine.config import OptimizerConfig, ParallelConfig, RunConfig, ScheduleConfig, TrainConfig
from inlinevit.engine.setup import (
    build_on_meta,
    convert_batch_norms,
    make_ema,
    make_mesh,
    make_optimizer,
    make_scheduler,
    shard_model,
)
from inlinevit.layers import Block
from tests.engine.toy import MODELS, Mlp, make_model, make_trainer, settings

LR, MIN_LR, WARMUP_LR = 0.1, 0.01, 0.001


def rates(steps_per_epoch: int = 10, total_batch: int = 32, **options: Any) -> list[float]:
    """The learning rate at each step of a schedule."""
    rule = OptimizerConfig(name="sgd", lr=LR, lr_base_size=options.pop("lr_base_size", 0))
    optimizer = make_optimizer(nn.Linear(2, 2), rule, total_batch)
    schedule = ScheduleConfig(min_lr=MIN_LR, warmup_lr=WARMUP_LR, **options)
    scheduler, total = make_scheduler(optimizer, schedule, rule, total_batch, steps_per_epoch)
    found = []
    for step in range(total):
        scheduler.step_update(step)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def warm(step: int, length: float) -> float:
    return WARMUP_LR + (LR - WARMUP_LR) * step / length


def cosine(step: int, length: int) -> float:
    return MIN_LR + (LR - MIN_LR) * (1 + math.cos(math.pi * step / length)) / 2


def test_cosine_with_warm_up_and_cool_down() -> None:
    found = rates(name="cosine", epochs=6, warmup=2, cooldown=1)
    assert len(found) == 70
    expected = [warm(step, 20) for step in range(20)] + [cosine(step, 60) for step in range(20, 60)] + [MIN_LR] * 10
    assert found == pytest.approx(expected)


def test_warm_up_of_half_an_epoch() -> None:
    found = rates(name="cosine", epochs=2, warmup=0.5)
    assert found == pytest.approx([warm(step, 5) for step in range(5)] + [cosine(step, 20) for step in range(5, 20)])


def test_multistep() -> None:
    found = rates(name="multistep", epochs=6, warmup=1, milestones=[3, 5], decay_rate=0.1)
    # timm looks a step ahead.
    expected = [warm(step, 10) for step in range(10)] + [LR] * 19 + [LR / 10] * 20 + [LR / 100] * 11
    assert found == pytest.approx(expected)


def test_step() -> None:
    found = rates(name="step", epochs=6, warmup=0, milestones=[2], decay_rate=0.5)
    assert found == pytest.approx([LR] * 20 + [LR / 2] * 20 + [LR / 4] * 20)


def test_poly_by_steps() -> None:
    found = rates(name="poly", steps=40, warmup=4, decay_rate=0.9)
    decay = [MIN_LR + (LR - MIN_LR) * (1 - step / 40) ** 0.9 for step in range(4, 40)]
    assert found == pytest.approx([warm(step, 4) for step in range(4)] + decay)


def test_rates_grow_with_the_total_batch() -> None:
    found = rates(name="cosine", epochs=2, warmup=1, lr_base_size=256, total_batch=1024)
    assert found == pytest.approx([4 * rate for rate in rates(name="cosine", epochs=2, warmup=1)])


@pytest.mark.parametrize(
    ("name", "hint"), [("cosin", "did you mean cosine?"), ("plateau", "try cosine"), ("x", "try cosine")]
)
def test_unknown_schedule(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"there is no schedule called '{name}': {hint[:-1]}"):
        rates(name=name, epochs=2, warmup=1)


@pytest.mark.parametrize(("name", "hint"), [("adamww", "did you mean adamw"), ("zzzz", "try adamw, lamb")])
def test_unknown_optimizer(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"timm has no optimizer called '{name}': {hint}"):
        make_optimizer(nn.Linear(2, 2), OptimizerConfig(name=name), 1)


@pytest.mark.parametrize("attention", ["inline", "softmax"])
@pytest.mark.parametrize("name", MODELS)
def test_what_does_not_decay(name: str, attention: str) -> None:
    model = make_model(name, attention=attention)
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.05), 512)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decays) == len(list(model.parameters()))
    words = ("cls_token", "pos_embed", "relative_position_bias_table")
    for parameter_name, parameter in model.named_parameters():
        free = parameter.ndim == 1 or parameter_name.endswith("bias") or parameter_name.endswith(words)
        assert decays[id(parameter)] == (0.0 if free else 0.05), parameter_name
    tables = [key for key, _ in model.named_parameters() if key.endswith(words)]
    assert len(tables) > 0 or name in ("inline_swin_tiny", "inline_cswin_tiny")


def test_softmax_swin_has_a_table_that_does_not_decay() -> None:
    names = [name for name, _ in make_model("inline_swin_tiny", attention="softmax").named_parameters()]
    assert any(name.endswith("relative_position_bias_table") for name in names)


@pytest.mark.parametrize("name", MODELS)
def test_rates_fall_from_layer_to_layer(name: str) -> None:
    model = make_model(name)
    optimizer = make_optimizer(model, OptimizerConfig(layer_decay=0.5), 512)
    scales = {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    by_name = {key: scales[id(p)] for key, p in model.named_parameters()}
    blocks = sum(isinstance(module, Block) for module in model.modules())
    assert by_name["head.weight"] == 1.0
    # The first embedding, the blocks, and what comes after them.
    assert min(by_name.values()) == pytest.approx(0.5 ** (blocks + 1))
    assert len(set(by_name.values())) == blocks + 2


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_patterns_scale_the_rates_of_parameters(layer_decay: float | None) -> None:
    model = make_model("inline_deit_tiny")
    scales = {"*.local_residual.*": 4.0, "head.weight": 0.1}
    usual = make_optimizer(model, OptimizerConfig(layer_decay=layer_decay), 512)
    scaled = make_optimizer(model, OptimizerConfig(layer_decay=layer_decay, lr_scales=scales), 512)
    before, after = (
        {
            id(p): (group.get("lr_scale", 1.0), group["weight_decay"])
            for group in one.param_groups
            for p in group["params"]
        }
        for one in (usual, scaled)
    )
    names = dict(model.named_parameters())
    assert len(after) == len(before) == len(names) == sum(len(group["params"]) for group in scaled.param_groups)
    for name, parameter in names.items():
        factor = 4.0 if ".local_residual." in name else 0.1 if name == "head.weight" else 1.0
        rate, decay = before[id(parameter)]
        assert after[id(parameter)] == (factor * rate, decay), name
    assert sum(".local_residual." in name for name in names) > 4


def test_scaled_rates_change_weights_in_proportion() -> None:
    """Sgd without momentum moves a parameter by its learning rate times its gradient, also under a schedule."""
    models = [nn.Linear(3, 2, bias=True), nn.Linear(3, 2, bias=True)]
    models[1].load_state_dict(models[0].state_dict())
    start = {name: value.clone() for name, value in models[0].state_dict().items()}
    moves = []
    for model, scales in zip(models, ({}, {"bias": 8.0}), strict=True):
        config = OptimizerConfig(
            name="momentum", lr=0.5, momentum=0.0, weight_decay=0.0, lr_base_size=0, lr_scales=scales
        )
        optimizer = make_optimizer(model, config, 1)
        scheduler, _ = make_scheduler(optimizer, ScheduleConfig(steps=4, warmup=0), config, 1, 1)
        scheduler.step_update(1)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        moves.append({name: value.detach() - start[name] for name, value in model.named_parameters()})
    assert torch.equal(moves[1]["weight"], moves[0]["weight"])
    torch.testing.assert_close(moves[1]["bias"], 8 * moves[0]["bias"])
    assert moves[0]["bias"].abs().min() > 0.1


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"wieght": 2.0}, "no parameter that is trained matches 'wieght': did you mean weight"),
        ({"frozen.*": 2.0}, "no parameter that is trained matches 'frozen.*': names begin with weight, bias"),
        ({"*": 2.0, "bias": 3.0}, "bias matches '\\*' and 'bias'"),
    ],
)
def test_patterns_that_cannot_be_meant(scales: dict[str, float], message: str) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=f"optimizer.lr_scales: {message}"):
        make_optimizer(model, OptimizerConfig(lr_scales=scales), 1)


def test_an_optimizer_that_ignores_factors_is_refused() -> None:
    make_optimizer(nn.Linear(3, 2), OptimizerConfig(name="radamlegacy"), 1)
    for options in ({"lr_scales": {"bias": 2.0}}, {"layer_decay": 0.5}):
        with pytest.raises(ValueError, match="radamlegacy has one learning rate for all parameters: leave out"):
            make_optimizer(nn.Linear(3, 2), OptimizerConfig(name="radamlegacy", **options), 1)


def test_options_reach_the_optimizer() -> None:
    options: dict[str, Any] = {"betas": (0.8, 0.7), "eps": 1e-3, "momentum": 0.6, "lr": 0.3, "lr_base_size": 64}
    adamw = make_optimizer(nn.Linear(2, 2), OptimizerConfig(name="adamw", **options), 128).param_groups[0]
    assert (adamw["betas"], adamw["eps"], adamw["lr"]) == ((0.8, 0.7), 1e-3, 0.6)
    del options["betas"], options["eps"]
    sgd = make_optimizer(nn.Linear(2, 2), OptimizerConfig(name="sgd", **options), 128).param_groups[0]
    assert (sgd["momentum"], sgd["lr"]) == (0.6, 0.6)
    lion = make_optimizer(nn.Linear(2, 2), OptimizerConfig(name="lion", betas=(0.8, 0.7)), 128).param_groups[0]
    assert lion["betas"] == (0.8, 0.7)
    # Defaults of others stay as they are.
    assert make_optimizer(nn.Linear(2, 2), OptimizerConfig(name="lion"), 128).param_groups[0]["betas"] == (0.9, 0.99)


@pytest.mark.parametrize(("name", "is_fused"), [("adamw", True), ("sgd", True), ("lion", False), ("lamb", False)])
def test_fused_updates_are_those_of_single_operators(name: str, is_fused: bool) -> None:
    models = [nn.Linear(5, 3), nn.Linear(5, 3)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        make_optimizer(model, OptimizerConfig(name=name, lr=0.1), 512, device)
        for model, device in zip(models, ("cpu", "cuda"), strict=True)
    ]
    assert bool(optimizers[0].param_groups[0].get("fused")) == is_fused
    for _ in range(3):
        x = torch.randn(4, 5)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "option", "value"), [("sgd", "betas", (0.8, 0.7)), ("sgd", "eps", 1e-3), ("lion", "eps", 1e-3)]
)
def test_options_that_an_optimizer_lacks(name: str, option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"optimizer {name} does not take optimizer\.{option}: leave it out"):
        make_optimizer(nn.Linear(2, 2), OptimizerConfig(**{"name": name, option: value}), 1)


@pytest.mark.parametrize(("batch_size", "decay"), [(0, 0.99), (1024, 0.99**0.5), (256, 0.99**2)])
def test_decay_of_averages_by_total_batch(batch_size: int, decay: float) -> None:
    average = make_ema(nn.Linear(2, 2), RunConfig(ema_decay=0.99, ema_batch_size=batch_size), 512)
    assert average is not None
    assert average.decay == pytest.approx(decay)


def test_no_average_unless_wanted() -> None:
    assert make_ema(nn.Linear(2, 2), RunConfig(), 512) is None


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("inline_swin_tiny", Block),
        *(pytest.param(name, Block, marks=pytest.mark.slow) for name in MODELS if name != "inline_swin_tiny"),
        ("vit_tiny_patch16_224", timm.models.vision_transformer.Block),
        ("swin_tiny_patch4_window7_224", timm.models.swin_transformer.SwinTransformerBlock),
        ("convnext_atto", timm.models.convnext.ConvNeXtBlock),
    ],
)
def test_blocks_are_sharded(name: str, block: type[nn.Module]) -> None:
    model = make_model(name) if name in MODELS else timm.create_model(name)
    blocks = [module for module in model.modules() if isinstance(module, block)]
    assert len(blocks) > 1
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    # Some of timm's are not in the state dict.
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    with one_process():
        shard_model(model, Accelerator(cpu=True))
        assert all(torch.equal(cast(DTensor, p).full_tensor(), weights[key]) for key, p in model.named_parameters())
        assert all(torch.equal(value, buffers[key]) for key, value in model.named_buffers())
    assert [module for module in model.modules() if isinstance(module, FSDPModule)] == [model, *blocks]
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_models_are_built_without_memory_if_they_can_be() -> None:
    def reads_a_value() -> nn.Module:
        return nn.Linear(2, round(torch.ones(()).item()))

    assert next(build_on_meta(lambda: nn.Linear(2, 2)).parameters()).is_meta
    assert not next(build_on_meta(reads_a_value).parameters()).is_meta


@contextmanager
def one_process() -> Iterator[None]:
    """A context after which the process group that sharding has made is gone."""
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_model_without_blocks_is_not_sharded() -> None:
    with pytest.raises(ValueError, match=r"run\.fsdp finds no blocks to shard by in Mlp: train it without"):
        shard_model(Mlp(0.0, batch_norm=False), Accelerator(cpu=True))


def test_averaging_sharded_weights_is_refused() -> None:
    with pytest.raises(ValueError, match=r"run\.fsdp cannot average sharded weights: set --run\.ema_decay null"):
        RunConfig(fsdp=True, ema_decay=0.99)


def test_half_precision_that_a_cpu_lacks(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has it")
    with pytest.raises(ValueError, match=r"run\.precision fp16 needs a GPU: choose bf16, or no"):
        make_trainer(settings(tmp_path / "run", run__precision="fp16"))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("adahessian", "needs second derivatives, which are not computed: try adamw"),
        ("bnbadamw8bit", "cannot be used here .*: choose another one"),
        ("fusedlamb", "cannot be used here .*: choose another one"),
    ],
)
def test_optimizers_that_cannot_be_used(name: str, problem: str) -> None:
    if torch.cuda.is_available() and name != "adahessian":
        pytest.skip("this machine may have it")
    with pytest.raises(ValueError, match=f"optimizer {name} {problem}"):
        make_optimizer(nn.Linear(2, 2), OptimizerConfig(name=name), 1)


def test_batch_norms_see_all_processes() -> None:
    def accelerator(processes: int, device: str) -> Accelerator:
        return cast(Accelerator, SimpleNamespace(num_processes=processes, device=torch.device(device)))

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.LayerNorm(4))

    kinds = [type(part) for part in convert_batch_norms(model(), accelerator(2, "cuda")).children()]
    assert kinds == [nn.Conv2d, nn.SyncBatchNorm, nn.LayerNorm]
    alone = model()
    assert convert_batch_norms(alone, accelerator(1, "cpu")) is alone
    assert isinstance(alone[1], nn.BatchNorm2d)
    # Some of timm's norms have activations inside.
    backbone = timm.create_model("test_efficientnet").eval()
    images = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        before = backbone(images)
        torch.testing.assert_close(convert_batch_norms(backbone, accelerator(2, "cuda")).eval()(images), before)
    with pytest.raises(ValueError, match="needs processes with a GPU each"):
        convert_batch_norms(model(), accelerator(2, "cpu"))


def test_where_processes_cannot_share_images() -> None:
    one = Mock(num_processes=1)
    config = TrainConfig(parallel=ParallelConfig(sequence=2))
    with pytest.raises(ValueError, match=r"parallel\.sequence .* this task has maps .*: set --parallel\.sequence 1"):
        make_mesh(one, config, supports_sequence=False)
    with pytest.raises(ValueError, match=r"parallel\.sequence is 2, but the number of processes is 1: start"):
        make_mesh(one, config, supports_sequence=True)
    config.run.compile = True
    with pytest.raises(ValueError, match=r"run\.compile does not compile .*: leave it out"):
        make_mesh(one, config, supports_sequence=True)
    assert make_mesh(one, TrainConfig(run=RunConfig(compile=True)), supports_sequence=False) is None
