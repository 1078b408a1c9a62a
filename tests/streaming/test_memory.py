"""Streaming stays within its budget, and refuses what does not fit."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import inlinevit
from inlinevit.streaming import token_map
from inlinevit.streaming.plan import MemoryPlan, StageSize, make_plan, parse_bytes
from inlinevit.streaming.token_map import FileTokenMap, MemoryTokenMap
from tests.streaming.models import make_image, make_model, spill_always

# Streams an image whose tokens take 101 MB, in memory and spilled; prints by how many bytes the peak of memory grew.
CHILD = """
import sys, timm, torch, inlinevit
torch.set_num_threads(1)
class Source:
    channels = 3
    def __init__(self, width, height):
        self.size = (width, height)
    def rows(self, top, bottom):
        return torch.ones(3, bottom - top, self.size[0])
def memory(field):
    with open("/proc/self/status") as status:
        return 1024 * int(next(line for line in status if line.startswith(field)).split()[1])
options = {"patch_size": 4, "depth": 1, "class_token": False, "global_pool": "avg", "num_classes": 3, "mlp_ratio": 0.5}
model = timm.create_model("inline_deit_tiny", embed_dim=192, **options).eval()
inlinevit.stream(model, Source(64, 64))
for budget, spill in ((170_000_000, None), (80_000_000, sys.argv[1])):
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before = memory("VmRSS")
    inlinevit.stream(model, Source(2048, 1024), memory=budget, spill=spill)
    print(memory("VmHWM") - before)
"""


@pytest.mark.integration
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is measured on Linux")
def test_the_peak_of_memory_stays_within_the_budget(tmp_path):
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    in_memory, spilled = map(int, result.stdout.split())
    # Less than OVERHEAD beyond the budget: this model needs little of it.
    assert 100_000_000 < in_memory < 170_000_000 + 16_000_000
    assert spilled < 80_000_000 + 16_000_000
    assert list(tmp_path.iterdir()) == []


STAGES = [StageSize(1000, 500, 32, 1, 1, 300, 0), StageSize(500, 250, 64, 7, 1, 600, 1000)]


def plan(budget: int, *, can_spill: bool = False, must_spill: bool = False, rows: int | None = None) -> MemoryPlan:
    return make_plan(STAGES, budget, can_spill=can_spill, must_spill=must_spill, chunk_rows=rows)


def test_maps_are_in_memory_if_they_fit():
    assert plan(200_000_000).in_memory
    assert plan(200_000_000, can_spill=True).in_memory
    assert not plan(200_000_000, can_spill=True, must_spill=True).in_memory
    assert not plan(100_000_000, can_spill=True).in_memory
    for budget in (60_000_000, 80_000_000, 130_000_000, 10**10):
        chosen = plan(budget, can_spill=True)
        assert chosen.peak_bytes <= budget
        assert all(rows % stage.row_multiple == 0 for rows, stage in zip(chosen.chunk_rows, STAGES, strict=True))
    assert plan(60_000_000, can_spill=True).chunk_rows[0] < plan(80_000_000, can_spill=True).chunk_rows[0]


@pytest.mark.parametrize("can_spill", [False, True])
def test_the_minimum_in_the_message_is_the_minimum(can_spill):
    with pytest.raises(ValueError, match="too small for this image and model: allow at least") as caught:
        plan(1_000_000, can_spill=can_spill)
    assert ("a folder to spill to" in str(caught.value)) == (not can_spill)
    minimum = re.search(r"at least (\d+(?:\.\d+)? [MG]B)", str(caught.value))
    assert minimum is not None
    least = parse_bytes(minimum[1])
    assert plan(least, can_spill=can_spill).peak_bytes <= least
    with pytest.raises(ValueError, match="too small"):
        plan(least - 1_000_001, can_spill=can_spill)


def test_chunk_rows_are_rounded_to_whole_windows():
    assert plan(10**10, rows=10).chunk_rows == (10, 7)
    assert plan(10**10, rows=5000).chunk_rows == (1000, 504)


@pytest.mark.parametrize(
    ("text", "count"), [("2GB", 2 * 10**9), ("1.5 gb", 15 * 10**8), ("512MiB", 2**29), (1000, 1000), ("77", 77)]
)
def test_memory_is_a_number_with_a_unit(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "2 bananas", "-1GB", 0, "0MB", "1e9", True, "nan", "9" * 40])
def test_other_memory_is_refused(text):
    with pytest.raises(ValueError, match="it should be a number with a unit"):
        parse_bytes(text)


def test_a_budget_that_is_too_small_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(ValueError, match=r"the memory of 1 MB is too small .*: allow at least \d+ MB"):
        inlinevit.stream(make_model("deit"), make_image(64, 64), memory="1MB", spill=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_to_spill_to_must_exist(tmp_path):
    with pytest.raises(ValueError, match="is not a folder: name one that exists"):
        inlinevit.stream(make_model("deit"), make_image(64, 64), spill=tmp_path / "missing")


@pytest.mark.parametrize("where", ["posix_fallocate", "pwrite"])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(where, tmp_path, monkeypatch):
    def fail(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    spill_always(monkeypatch)
    monkeypatch.setattr(token_map.os, where, fail)
    with pytest.raises(OSError, match=f"need 0.0 GB in {tmp_path}, which has no space left: free some") as caught:
        inlinevit.stream(make_model("deit"), make_image(64, 64), spill=tmp_path)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_maps_are_read_as_they_were_written(kind, tmp_path):
    tokens = MemoryTokenMap(50, 40, 24) if kind == "memory" else FileTokenMap(50, 40, 24, folder=tmp_path)
    rows = torch.randn(50, 40, 24)
    for top in range(0, 50, 7):
        tokens.write(top, rows[top : top + 7])
    assert torch.equal(tokens.read(3, 50), rows[3:])
    assert tokens.read(5, 5).shape == (0, 40, 24)
    tokens.write(10, 2 * rows[10:12])
    # Only whole pages are given back, and never a part of the rows that stay.
    tokens.release(0, 21)
    assert torch.equal(tokens.read(21, 50), rows[21:])
    tokens.close()
    assert list(tmp_path.iterdir()) == []
