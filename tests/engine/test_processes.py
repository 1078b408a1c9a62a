"""Several processes do what one does with the same total batch."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from inlinevit.engine.checkpoints import entry_of, manifest_bytes, read_manifest
from inlinevit.engine.runs import run_weights
from inlinevit.engine.state import check_weights, shard_layout
from tests.engine.running import ENVIRONMENT, TOY, Server, assert_same_run, final_tensors, metric_lines
from tests.engine.toy import free_port, make_model, settings

pytestmark = pytest.mark.integration

# Nothing that depends on how samples are split over processes: no dropout, no statistics of a batch.
EVEN = {"toy__dropout": 0.0, "toy__batch_norm": False, "schedule__epochs": 2}
PAIR: dict[str, Any] = {"toy__batch_size": 2, "schedule__epochs": 2}


@pytest.fixture(scope="module")
def pair(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that was not interrupted."""
    output = tmp_path_factory.mktemp("pair") / "run"
    server.run(settings(output, **PAIR), processes=2)
    return output


# Biases of keys stay 0 but for rounding, because InLine attention subtracts the mean over the keys: their gradients are
# about 1e-11 in float32 and 1e-20 in float64. With eps = 1e-8, AdamW makes steps of up to 1e-6 of that, in any
# direction; after 24 steps, they are up to 3.1e-6. Other biases of such a run are some 1e-3.
LARGEST_KEY_BIAS = 1e-5


def without_key_biases(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a run with zeros for the biases of keys, which have to be rounding only."""
    kept = dict(tensors)
    for name in [name for name in kept if name.endswith("attn.qkv.bias")]:
        query, key, value = kept[name].chunk(3)
        assert key.abs().max() < LARGEST_KEY_BIAS, name
        kept[name] = torch.cat([query, torch.zeros_like(key), value])
    return kept


def assert_alike(output: Path, reference: Path) -> None:
    """Two runs tell the same but for rounding."""
    ours, theirs = metric_lines(output), metric_lines(reference)
    assert [line.keys() for line in ours] == [line.keys() for line in theirs]
    for our, their in zip(ours, theirs, strict=True):
        assert our == pytest.approx(their, rel=1e-6)
    tensors, others = (without_key_biases(final_tensors(path)) for path in (output, reference))
    assert tensors.keys() == others.keys()
    for name in tensors:
        torch.testing.assert_close(tensors[name], others[name], rtol=1e-4, atol=1e-6)


def assert_same_weights(output: Path, reference: Path) -> None:
    """Two runs tell the same and export the same weights, but for rounding.

    Some gradients are zero but for rounding, such as those of the biases of keys, and AdamW takes steps nevertheless.
    """
    for ours, theirs in zip(metric_lines(output), metric_lines(reference), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    exported, whole = (safetensors.torch.load_file(path / "model.safetensors") for path in (output, reference))
    assert exported.keys() == whole.keys()
    for name, weight in exported.items():
        torch.testing.assert_close(weight, whole[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("grad_accum_steps", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_processes_and_one(server: Server, tmp_path: Path, grad_accum_steps: int) -> None:
    server.run(settings(tmp_path / "one", run__grad_accum_steps=grad_accum_steps, toy__batch_size=4, **EVEN))
    server.run(
        settings(tmp_path / "two", run__grad_accum_steps=grad_accum_steps, toy__batch_size=2, **EVEN), processes=2
    )
    # The 7 samples of the evaluation are counted once each.
    assert {line["eval_samples"] for line in metric_lines(tmp_path / "two") if "eval_samples" in line} == {7}
    assert_alike(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_two_processes_and_one_with_inline_attention(server: Server, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"toy__model": "inline_deit_tiny", "optimizer__lr": 1e-3, "run__log_every": 1}
    server.run(settings(tmp_path / "one", toy__batch_size=4, **changes))
    server.run(settings(tmp_path / "two", toy__batch_size=2, **changes), processes=2)
    assert_alike(tmp_path / "two", tmp_path / "one")


SEQUENCE: dict[str, Any] = {
    "toy__model": "inline_deit_tiny",
    "toy__batch_size": 4,
    "optimizer__lr": 1e-3,
    "run__log_every": 1,
    "schedule__epochs": 2,
}


def test_two_processes_share_images(server: Server, tmp_path: Path) -> None:
    """Each holds rows of every image; stopped and resumed, too."""
    server.run(settings(tmp_path / "one", **SEQUENCE))
    output = tmp_path / "two"
    changes = {**SEQUENCE, "parallel__sequence": 2}
    stopped = server.start(settings(output, toy__events={"7": "SIGTERM"}, **changes), processes=2)
    assert stopped.wait() == 128 + signal.SIGTERM, stopped.printed
    assert "(4 × 1 × 2 processes that share images × 2 accumulated)" in stopped.printed
    server.run(settings(output, **changes), processes=2)
    assert {line["eval_samples"] for line in metric_lines(output) if "eval_samples" in line} == {7}
    assert_same_weights(output, tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize("model", ["inline_pvt_tiny", "inline_swin_tiny", "inline_cswin_tiny"])
def test_four_processes_of_which_two_share_images(server: Server, tmp_path: Path, model: str, fsdp: bool) -> None:
    changes = {
        **SEQUENCE,
        "toy__model": model,
        "toy__size": 64,
        "run__ema_decay": None,
        "run__grad_checkpointing": not fsdp,
    }
    server.run(settings(tmp_path / "one", **changes))
    changes |= {"toy__batch_size": 2, "parallel__sequence": 2, "run__fsdp": fsdp}
    server.run(settings(tmp_path / "four", **changes), processes=4)
    assert_same_weights(tmp_path / "four", tmp_path / "one")


def test_processes_that_cannot_share_images_are_refused(server: Server, tmp_path: Path) -> None:
    forked = server.start(settings(tmp_path / "run", parallel__sequence=2, **SEQUENCE))
    assert forked.wait() == 1
    assert "error: parallel.sequence is 2, but the number of processes is 1: start a multiple of 2" in forked.printed
    forked = server.start(settings(tmp_path / "run", parallel__sequence=2), processes=2)
    assert forked.wait() == 1
    assert forked.printed.count("error: Mlp cannot be split over processes: choose a model of this library") == 2
    assert "Traceback" not in forked.printed


@pytest.mark.parametrize(
    ("number", "timeout", "sentence"),
    [
        (signal.SIGKILL, 30, "error: another process has ended before this one"),
        # Slow, because a machine that is busy elsewhere could exceed so short a time-out, too.
        pytest.param(
            *(signal.SIGSTOP, 0.05, "error: another process has not answered within the time-out"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_process_that_shares_images_is_lost(
    server: Server, tmp_path: Path, number: signal.Signals, timeout: float, sentence: str
) -> None:
    changes = {**SEQUENCE, "parallel__sequence": 2, "parallel__timeout_minutes": timeout, "toy__pause": 0.05}
    output = tmp_path / "run"
    forked = server.start(settings(output, **changes), processes=2)
    while not list((output / "checkpoints").glob("step-*")):
        time.sleep(0.01)
    forked.kill(number, process=1)
    deadline = time.monotonic() + 120
    while sentence not in forked.printed and time.monotonic() < deadline:
        time.sleep(0.05)
    if number == signal.SIGSTOP:
        forked.kill(signal.SIGKILL, process=1)
    forked.wait()
    assert forked.codes == [1, -signal.SIGKILL], forked.printed
    assert sentence in forked.printed
    assert "Traceback" not in forked.printed


@pytest.mark.slow
def test_gradients_are_shared_between_processes(server: Server, tmp_path: Path) -> None:
    """Without it, the test above could not be red: one process's half of a batch gives other weights."""
    server.run(settings(tmp_path / "one", toy__batch_size=4, **EVEN))
    server.run(settings(tmp_path / "half", toy__batch_size=2, **{**EVEN, "schedule__epochs": 1}))
    with pytest.raises(AssertionError):
        assert_alike(tmp_path / "half", tmp_path / "one")


def test_one_process_is_asked_to_stop_and_all_do(server: Server, pair: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    forked = server.start(settings(output, toy__pause=0.05, **PAIR), processes=2)
    while not list((output / "checkpoints").glob("step-*")):
        time.sleep(0.01)
    forked.kill(signal.SIGTERM, process=1)
    forked.wait()
    assert forked.codes == [128 + signal.SIGTERM] * 2, forked.printed
    server.run(settings(output, **PAIR), processes=2)
    assert_same_run(output, pair)


def test_a_rank_is_killed(server: Server, pair: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    forked = server.start(settings(output, toy__pause=0.05, **PAIR), processes=2)
    while not list((output / "checkpoints").glob("step-*")):
        time.sleep(0.01)
    forked.kill(signal.SIGKILL, process=1)
    time.sleep(0.2)
    # The other one fails or waits; a launcher ends it.
    with suppress(ProcessLookupError):
        forked.kill(signal.SIGKILL)
    assert forked.wait() != 0
    server.run(settings(output, **PAIR), processes=2)
    assert_same_run(output, pair)


def test_all_processes_stop_where_one_diverges(server: Server, tmp_path: Path) -> None:
    """Rank 1 has a loss of NaN in its 3rd batch, which is in step 2; steps are read after step 4."""
    output = tmp_path / "run"
    forked = server.start(settings(output, toy__events={"3": "nan of rank 1"}, **PAIR), processes=2)
    forked.wait()
    assert forked.codes == [1, 1], forked.printed
    assert "error: the loss is nan in step 2" in forked.printed
    assert (output / "diverged-step-2-process-1" / "batch.pt").exists()
    assert not list((output / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("first", "second"),
    [(2, 1), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in [(2, 4), (1, 2), (4, 2)])],
)
def test_resumed_on_another_number_of_processes(server: Server, tmp_path: Path, first: int, second: int) -> None:
    """The same command: the total batch stays what it was."""
    changes: dict[str, Any] = {"toy__batch_size": 8 // first, "run__log_every": 1, **EVEN}
    server.run(settings(tmp_path / "reference", **changes), processes=first)
    output = tmp_path / "run"
    stopped = server.start(settings(output, toy__events={"7": "SIGTERM"}, **changes), processes=first)
    assert stopped.wait() == 128 + signal.SIGTERM, stopped.printed
    forked = server.run(settings(output, **changes), processes=second)
    assert f"has 16 samples in a step: on {second} processes, that is" in forked.printed
    assert_alike(output, tmp_path / "reference")


@pytest.mark.slow
def test_resumed_with_a_batch_of_all_processes(server: Server, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"run__log_every": 1, **EVEN}
    server.run(settings(tmp_path / "reference", toy__batch_size=4, **changes), processes=2)
    output = tmp_path / "run"
    stopped = server.start(settings(output, toy__batch_size=4, toy__events={"7": "SIGTERM"}, **changes), processes=2)
    assert stopped.wait() == 128 + signal.SIGTERM
    server.run(settings(output, toy__batch_size=8, **changes))
    assert_alike(output, tmp_path / "reference")


@pytest.mark.slow
def test_processes_that_cannot_share_a_batch_are_refused(server: Server, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"schedule__epochs": 1, "toy__batch_size": 2}
    server.run(settings(tmp_path / "run", **changes), processes=2)
    forked = server.start(settings(tmp_path / "run", **changes), processes=3)
    assert forked.wait() == 1
    assert "the run has 8 samples in a step, which 3 processes with batches of up to 2" in forked.printed
    assert "Traceback" not in forked.printed


SHARDED: dict[str, Any] = {
    "toy__model": "inline_deit_tiny",
    "run__fsdp": True,
    "run__ema_decay": None,
    "run__log_every": 1,
    "optimizer__lr": 1e-3,
    "schedule__epochs": 2,
}


@pytest.mark.parametrize("second", [*(pytest.param(count, marks=pytest.mark.slow) for count in (1, 4)), 2])
def test_sharded_run_is_resumed_on_any_number_of_processes(server: Server, tmp_path: Path, second: int) -> None:
    """Checkpoints are written by all processes; the finished weights are exported to one file."""
    server.run(settings(tmp_path / "whole", toy__batch_size=8, **{**SHARDED, "run__fsdp": False}))
    output = tmp_path / "run"
    stopped = server.start(settings(output, toy__batch_size=4, toy__events={"7": "SIGTERM"}, **SHARDED), processes=2)
    assert stopped.wait() == 128 + signal.SIGTERM, stopped.printed
    newest = max((output / "checkpoints").glob("step-*"))
    assert len(list(newest.glob("shard-*.safetensors"))) == 2
    assert not (newest / "model.safetensors").exists()
    assert not [file for file in newest.iterdir() if file.suffix not in (".json", ".safetensors")]
    # An unfinished run can be used: its weights are put into one file.
    with pytest.warns(UserWarning, match="is not finished"):
        merged = run_weights(output, None)
    assert safetensors.torch.load_file(merged).keys() == make_model("inline_deit_tiny").state_dict().keys()
    # With one shard less, it is refused.
    shutil.copytree(newest, tmp_path / "incomplete")
    max((tmp_path / "incomplete").glob("shard-*.safetensors")).unlink()
    tensors = {f"model.{name}": value for name, value in make_model("inline_deit_tiny").state_dict().items()}
    with pytest.raises(ValueError, match=r"lacks a part of|the checkpoint is of another model"):
        check_weights(tensors, shard_layout(tmp_path / "incomplete"))
    server.run(settings(output, toy__batch_size=4, **SHARDED), processes=second)
    assert_same_weights(output, tmp_path / "whole")


@pytest.mark.slow
def test_sharded_checkpoint_that_is_damaged_or_edited(server: Server, tmp_path: Path) -> None:
    output = tmp_path / "run"
    changes: dict[str, Any] = {**SHARDED, "toy__batch_size": 4, "schedule__epochs": 1}
    server.run(settings(output, **changes), processes=2)
    path = max((output / "checkpoints").glob("step-*"))
    shard = path / "shard-00002-model-00001-of-00001.safetensors"
    whole, manifest = shard.read_bytes(), (path / "manifest.json").read_bytes()

    def message(**more: Any) -> str:
        forked = server.start(settings(output, **{**changes, **more}), processes=2)
        assert forked.wait() == 1
        assert "Traceback" not in forked.printed
        return forked.printed

    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert f"{shard.name} has changed since it was written" in message()
    shard.unlink()
    assert f"{shard.name} is missing" in message()
    # The manifest knows nothing of it, so the rest is as it should be, but incomplete.
    progress, entries = read_manifest(path)
    del entries[shard.name]
    (path / "manifest.json").write_bytes(manifest_bytes(progress, entries))
    assert "the checkpoint is of another model" in message() or "lacks a part of" in message()
    for content in (safetensors.torch.save({"model.head.bias": torch.ones(3)}), b"\xff" * 64, b""):
        shard.write_bytes(content)
        (path / "manifest.json").write_bytes(manifest_bytes(progress, {**entries, shard.name: entry_of(content)}))
        assert "error: " in message()
    shard.write_bytes(whole)
    (path / "manifest.json").write_bytes(manifest)
    server.run(settings(output, **changes), processes=2)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True])
def test_ranks_are_killed_and_torchrun_restarts_the_job(server: Server, tmp_path: Path, fsdp: bool) -> None:
    changes: dict[str, Any] = {**SHARDED, "run__fsdp": fsdp, "toy__batch_size": 2, "run__checkpoint_steps": 2}
    server.run(settings(tmp_path / "reference", **changes), processes=2)
    output = tmp_path / "run"
    torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max-restarts", "5"]
    process = launch(torchrun, settings(output, toy__pause=0.05, **changes), tmp_path)
    kills, last, deadline = 0, -1, time.monotonic() + 300
    while kills < 2 and process.poll() is None and time.monotonic() < deadline:
        ranks = children_of(process.pid)
        if len(ranks) == 2 and newest_step(output) > last:
            last = newest_step(output)
            # Each rank has its turn, the main process first.
            os.kill(ranks[kills % 2], signal.SIGKILL)
            kills += 1
        time.sleep(0.02)
    printed, _ = process.communicate(timeout=300)
    assert kills == 2
    assert process.returncode == 0, printed
    assert_same_run(output, tmp_path / "reference")


def newest_step(output: Path) -> int:
    steps = [int(path.name.removeprefix("step-")) for path in (output / "checkpoints").glob("step-*")]
    return max(steps, default=-1)


def children_of(process: int) -> list[int]:
    """The processes that a process has started, oldest first."""
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except FileNotFoundError:
        return []


def launch(launcher: list[str], plain: dict[str, Any], folder: Path) -> "subprocess.Popen[str]":
    """The toy job under a launcher."""
    file = folder / "settings.json"
    file.write_text(json.dumps(plain))
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, str(TOY), str(file)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_torchrun_is_stopped_and_resumed(server: Server, tmp_path: Path) -> None:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    server.run(settings(tmp_path / "reference", toy__batch_size=2), processes=2)
    output = tmp_path / "run"
    process = launch(torchrun, settings(output, toy__batch_size=2, toy__pause=0.02), tmp_path)
    deadline = time.monotonic() + 120
    while not list((output / "checkpoints").glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "stopped after step" in printed
    steps = max(int(path.name.removeprefix("step-")) for path in (output / "checkpoints").glob("step-*"))
    assert 5 <= steps < 24
    server.run(settings(output, toy__batch_size=2), processes=2)
    assert_same_run(output, tmp_path / "reference")


@pytest.mark.slow
def test_accelerate_launch(server: Server, tmp_path: Path) -> None:
    # Without a GPU, accelerate starts several processes under this name only; they use what they find.
    accelerate = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    accelerate += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", str(free_port())]
    server.run(settings(tmp_path / "reference", toy__batch_size=2), processes=2)
    process = launch(accelerate, settings(tmp_path / "run", toy__batch_size=2), tmp_path)
    printed, _ = process.communicate(timeout=200)
    assert process.returncode == 0, printed
    assert_same_run(tmp_path / "run", tmp_path / "reference")
