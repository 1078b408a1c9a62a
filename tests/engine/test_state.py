from pathlib import Path

import pytest
import torch

from inlinevit.engine.state import get_weights, set_weights
from tests.engine.running import Server
from tests.engine.toy import MODELS, Mlp, settings

SWIN = "inline_swin_tiny"


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
        set_weights(Mlp(0.0, batch_norm=False), weights)
    weights["fc1.weight"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"the checkpoint is of another model \(fc1.weight .*\): resume with"):
        set_weights(Mlp(0.0, batch_norm=True), weights)
