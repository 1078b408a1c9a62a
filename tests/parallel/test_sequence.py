"""Several processes that share images give the outputs and gradients of one."""

from pathlib import Path

import pytest
import torch

from inlinevit.layers import ResamplePosEmbed
from inlinevit.ops.windows import Windows, window_partition
from inlinevit.parallel import RowSharding, split_rows
from inlinevit.parallel.attention import plan_windows
from inlinevit.parallel.model import positions_of_rows
from tests.engine.running import Server
from tests.engine.toy import settings
from tests.parallel.checks import CASES, FAST

pytestmark = pytest.mark.integration


class Group:
    """As a SequenceGroup, without processes."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize(
    ("processes", "cases"), [(2, FAST), *(pytest.param(count, [*CASES], marks=pytest.mark.slow) for count in (2, 4))]
)
def test_outputs_and_gradients(server: Server, tmp_path: Path, processes: int, cases: list[str]) -> None:
    forked = server.run(settings(tmp_path / "run") | {"cases": cases}, job="sequence", processes=processes)
    assert forked.printed.count("shared as whole") == processes


@pytest.mark.parametrize(
    ("height", "reductions", "processes", "bounds"),
    [
        (64, [4, 8, 16, 32], 2, (0, 32, 64)),
        # The last one has the remainder, and one row of tokens more where they are uneven.
        (150, [4, 8, 16, 32], 2, (0, 64, 150)),
        (150, [4, 8, 16, 32], 4, (0, 32, 64, 96, 150)),
        (33, [16], 3, (0, 16, 32, 33)),
        (5, [4], 1, (0, 5)),
    ],
)
def test_rows_of_processes(height: int, reductions: list[int], processes: int, bounds: tuple[int, ...]) -> None:
    rows = split_rows(height, reductions, Group(processes - 1, processes))
    assert rows.bounds == bounds
    assert (rows.start, rows.end) == bounds[-2:]
    last = rows.padded(reductions[-1]).strided(reductions[-1])
    assert last.height == -(-height // reductions[-1])
    assert all(start < end for start, end in zip(last.bounds, last.bounds[1:], strict=False))


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="an image of 64 rows has 2 rows of tokens in the last stage, which 3"):
        split_rows(64, [4, 32], Group(0, 3))


@pytest.mark.parametrize(("interpolation", "prefix"), [("bicubic", 1), ("bilinear", 0)])
@pytest.mark.parametrize("size", [(7, 5), (7, 9), (15, 4), (3, 5)])
def test_positions_are_those_of_the_whole_map(interpolation: str, prefix: int, size: tuple[int, int]) -> None:
    resample = ResamplePosEmbed((7, 5), num_prefix_tokens=prefix, interpolation=interpolation)
    table = torch.randn(1, prefix + 35, 4, generator=torch.Generator().manual_seed(0))
    whole = resample(table, size)
    rows = [RowSharding((0, 2, size[0]), Group(rank, 2)) for rank in range(2)]
    parts = [positions_of_rows(table, resample, own, size[1]) for own in rows]
    assert all(torch.equal(part[:, :prefix], table[:, :prefix]) for part in parts)
    joined = torch.cat([parts[0], parts[1][:, prefix:]], dim=1)
    torch.testing.assert_close(joined, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("windows", [Windows(5, 7, 3, 3, 1, 1), Windows(5, 7, 5, 2), Windows(5, 7, 5, 7)])
@pytest.mark.parametrize("processes", [2, 3])
def test_each_window_belongs_to_one_process(windows: Windows, processes: int) -> None:
    """Simulated: what the processes send and receive are the tokens of their windows, in the order of the plan."""
    bounds = (0, 7, 35) if processes == 2 else (0, 7, 21, 35)
    plans = [plan_windows(windows, bounds, rank) for rank in range(processes)]
    expected = window_partition(torch.arange(1, 36).view(1, -1, 1), windows).squeeze(-1)
    sent = [plan.plan.send.split(plan.plan.sent) for plan in plans]
    for rank, own in enumerate(plans):
        received = torch.cat([sent[source][rank] + bounds[source] + 1 for source in range(processes)])
        assert [len(sent[source][rank]) for source in range(processes)] == own.plan.received
        tokens = torch.cat([received, torch.zeros(1, dtype=torch.long)])[own.places]
        assert torch.equal(tokens, expected[own.first : own.end])
        assert torch.equal(tokens.flatten()[own.order], received)
    assert sum(own.end - own.first for own in plans) == len(expected)
