import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from inlinevit.engine.checkpoints import CheckpointFolder, Progress, pack_state, pack_weights
from inlinevit.engine.state import check_weights, get_weights, restore
from tests.engine.running import Server
from tests.engine.toy import MODELS, Mlp, settings

SWIN = "inline_swin_tiny"


@pytest.mark.integration
@pytest.mark.parametrize(
    "model", [SWIN, *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != SWIN)]
)
def test_sharded_over_two_processes(server: Server, tmp_path: Path, model: str) -> None:
    forked = server.run(settings(tmp_path / "run", toy__model=model), job="shard", processes=2)
    assert forked.printed.count("sharded as whole") == 2


def test_weights_share_no_memory() -> None:
    model = Mlp(0.0, batch_norm=True)
    weights = get_weights(model)
    assert weights.keys() == model.state_dict().keys()
    weights["fc1.weight"].zero_()
    assert model.fc1.weight.abs().sum() > 0


def test_weights_of_another_model_are_refused() -> None:
    weights = get_weights(Mlp(0.0, batch_norm=True))
    with pytest.raises(ValueError, match="the checkpoint is of another model"):
        check_weights(Mlp(0.0, batch_norm=False).state_dict(), weights)
    weights["fc1.weight"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"the checkpoint is of another model \(fc1.weight .*\): resume with"):
        check_weights(Mlp(0.0, batch_norm=True).state_dict(), weights)


@pytest.mark.parametrize(
    ("group", "state", "message"),
    [
        ({"amsgrad": True}, {}, "optimizer.param_groups.0.amsgrad is True in place of False"),
        ({"capturable": True}, {}, "optimizer.param_groups.0.capturable is True in place of False"),
        ({}, {"step": torch.tensor(-1.0)}, "optimizer.state.0.step is -1.0, which is not a number of steps"),
        ({}, {"step": torch.tensor(torch.inf)}, "optimizer.state.0.step is inf, which is not a number of steps"),
    ],
)
def test_edited_states_are_refused(tmp_path: Path, group: dict[str, Any], state: dict[str, Any], message: str) -> None:
    model, optimizer, path = stored_state(tmp_path, group, state)
    with pytest.raises(ValueError, match=rf"is not that of this run's optimizer \({message}\): resume with"):
        restore(path, model, None, optimizer, Accelerator(cpu=True))


def test_settings_of_a_checkpoint_do_not_count(tmp_path: Path) -> None:
    model, optimizer, path = stored_state(tmp_path, {"betas": (2.0, -2.0), "eps": -1.0, "weight_decay": -5.0}, {})
    restore(path, model, None, optimizer, Accelerator(cpu=True))
    (group,) = optimizer.optimizer.param_groups
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.999), 1e-8, 0.01)
    assert float(optimizer.optimizer.state[model.fc1.weight]["step"]) == 3


def stored_state(folder: Path, group: dict[str, Any], state: dict[str, Any]) -> tuple[Any, Any, Path]:
    """A model and its optimizer, and a checkpoint of them after 3 steps in which values were changed."""
    model = Mlp(0.0, batch_norm=False)
    optimizer = Accelerator(cpu=True).prepare_optimizer(torch.optim.AdamW(model.parameters()))
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    content = copy.deepcopy(optimizer.optimizer.state_dict())
    content["param_groups"][0] |= group
    content["state"][0] |= state
    weights = {"model.safetensors": pack_weights(get_weights(model))}
    files = {**weights, **pack_state({"optimizer": content, "scaler": None})}
    return model, optimizer, CheckpointFolder(folder).save(Progress(step=3), files)
