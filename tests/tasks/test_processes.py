"""The evaluation commands of all tasks on two processes: the same files as on one, and one process prints."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from inlinevit.engine.evaluator import eval_command
from inlinevit.tasks import TASKS
from tests.engine.running import Server
from tests.tasks.runs import MAKE

pytestmark = pytest.mark.integration

# The number of images of each task: two processes have shares of different sizes.
IMAGES = {"classification": 6, "multilabel": 5, "detection": 5, "segmentation": 5}
# When a page was made.
FOOTER = re.compile(rb"<footer>.*</footer>")
# Sharded models: processes that share parameters must not wait for each other.
SCRIPT = """
import sys
from accelerate import Accelerator
from inlinevit.engine.evaluator import eval_command
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from inlinevit.tasks import TASKS

folder = sys.argv[1]
# The process group is needed until the last task has been evaluated.
Accelerator.end_training = lambda accelerator: None
for name, entry in TASKS.items():
    task = entry.load_task()
    load = task.load_predictor

    def load_sharded(*arguments, load=load):
        predictor = load(*arguments)
        # All processes have all weights, and one of them loads them before the others: nothing may be broadcast here.
        fully_shard(predictor.model, mesh=init_device_mesh("cpu", (2,)))
        return predictor

    if name in ("detection", "segmentation"):
        task.load_predictor = load_sharded
    options = entry.load_eval_options()(output=f"{folder}/two/{name}")
    eval_command(task, f"{folder}/{name}_run", options)
"""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run of each task, with its data."""
    for make in MAKE.values():
        make(tmp_path)
    return tmp_path


def rounded(value: Any) -> Any:
    """JSON in which numbers are rounded: a mean loss may depend on the order of images."""
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return round(value, 5) if isinstance(value, float) else value


def test_two_processes_evaluate_as_one_does(runs: Path, server: Server) -> None:
    AcceleratorState._reset_state()
    before = torch.get_num_threads()
    # As many threads as other processes have: sums may depend on it.
    torch.set_num_threads(1)
    for name, entry in TASKS.items():
        options = entry.load_eval_options()(output=str(runs / "one" / name))
        eval_command(entry.load_task(), str(runs / f"{name}_run"), options)
    torch.set_num_threads(before)
    modules = tuple(f"inlinevit.tasks.{name}.task" for name in TASKS)
    forked = server.script(SCRIPT, [str(runs)], runs / "printed", modules=modules, processes=2)
    assert forked.wait() == 0, forked.printed
    assert forked.printed.count("top-1 %") == 1
    assert forked.printed.count("mIoU %") == 1
    for name, images in IMAGES.items():
        one, two = (json.loads((runs / part / name / "evaluation.json").read_text()) for part in ("one", "two"))
        assert one["images"] == two["images"] == images
        assert rounded(two) == rounded(one)
        files = {file.name for file in (runs / "one" / name).iterdir()}
        assert files == {file.name for file in (runs / "two" / name).iterdir()}
        assert {"evaluation.html", "predictions.csv"} <= files
        for file in files - {"evaluation.json"}:
            one, two = (FOOTER.sub(b"", (runs / part / name / file).read_bytes()) for part in ("one", "two"))
            assert one == two, file
