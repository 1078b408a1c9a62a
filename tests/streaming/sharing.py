"""Processes that share an image; run as a program by each of them."""

import re
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import inlinevit
from inlinevit.cli.errors import report_error
from inlinevit.streaming import TensorSink
from tests.streaming.models import make_image, make_model

# Rows of tokens that processes cannot share evenly, windows at the border, and stages of fewer rows than processes.
SIZES = [(70, 203), (150, 67), (260, 40)]
# The 18 rows of tokens of the first one are 3 rows of windows: of 7 tokens, and of 8 that have keys in common.
LOW = ("softmax windows", "reduced softmax")


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


def check_kind(kind: str, size: tuple[int, int], **options: Any) -> None:
    """Compare logits and all maps of stages with the plain forward pass."""
    model, image = make_model(kind), make_image(*size)
    with torch.no_grad():
        expected, levels = model(image), model.forward_intermediates(image, intermediates_only=True)
    names = [info["module"] for info in model.feature_info]
    sinks = {name: TensorSink() for name in names}
    out = inlinevit.stream(model, image, features=sinks, group=dist.group.WORLD, **options)
    assert relative_error(out, expected) < 1e-5, (kind, size, options, relative_error(out, expected))
    for name, level in zip(names, levels, strict=True):
        if dist.get_rank() > 0:
            assert sinks[name].map.numel() == 0
            continue
        error = relative_error(sinks[name].map, level[0].permute(1, 2, 0))
        assert error < 1e-5, (kind, size, options, name, error)


def check_mask(kind: str) -> None:
    """Compare with one process; the last rows, all of one process, are background."""
    model, image = make_model(kind), make_image(150, 100)
    mask = torch.rand(150, 100, generator=torch.Generator().manual_seed(0)) < 0.3
    mask[64:] = False
    alone = inlinevit.stream(model, image, mask=mask)
    shared = inlinevit.stream(model, image, mask=mask, group=dist.group.WORLD, chunk_rows=3)
    assert relative_error(shared, alone) < 1e-5, (kind, relative_error(shared, alone))


class CountedSource:
    """An image source that notes which rows were read."""

    channels = 3

    def __init__(self, image: torch.Tensor) -> None:
        self.image, self.size = image, (image.shape[3], image.shape[2])
        self.read: list[int] = []

    def rows(self, top: int, bottom: int) -> torch.Tensor:
        self.read += range(top, bottom)
        return self.image[0, :, top:bottom]


def check_pixels() -> None:
    """Each process reads its own rows of pixels, once."""
    for kind, overlap in (("pvt", 0), ("cswin", 3)):
        source = CountedSource(make_image(150, 60))
        inlinevit.stream(make_model(kind), source, group=dist.group.WORLD, chunk_rows=2)
        assert source.read == list(range(source.read[0], source.read[-1] + 1))
        counts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(counts, len(source.read))
        assert 150 <= sum(counts) <= 150 + 2 * overlap * (len(counts) - 1)
        assert max(counts) < 150


def refused(problem: str, kind: str = "deit", size: tuple[int, int] = (64, 64), **options: Any) -> None:
    """Check that a call is refused in all processes, before anything is read."""
    source = CountedSource(make_image(*size))
    with pytest.raises(ValueError, match=re.escape(problem)) as caught:
        inlinevit.stream(make_model(kind), source, group=dist.group.WORLD, **options)
    assert "\n" not in str(caught.value)
    assert source.read == []


def check_refused(folder: Path) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    refused("several processes that share an image is not saved: leave out resume", resume=folder / "state")
    refused(f"which {size} processes cannot share: use at most 1 processes", size=(16, 64))
    refused("have another image size: start all of them with the same", size=(64 + 16 * rank, 64))
    refused("have another model or mask", kind="deit" if rank == 0 else "linear")
    # A mistake of one process ends all of them.
    memory = "2GB" if rank == 1 else "1kB"
    refused("the memory of 1 MB is too small" if rank != 1 else "process 0 of those", memory=memory)


def check_spilled(folder: Path) -> None:
    """Tokens in files."""
    folder.mkdir(exist_ok=True)
    model, image = make_model("swin"), make_image(300, 200)
    with torch.no_grad():
        expected = model(image)
    out = inlinevit.stream(model, image, memory="51MB", spill=folder, group=dist.group.WORLD)
    assert relative_error(out, expected) < 1e-5
    assert list(folder.iterdir()) == []


class StoppingSource(CountedSource):
    """A source that waits, so that its process can be killed."""

    def rows(self, top: int, bottom: int) -> torch.Tensor:
        if dist.get_rank() == 1:
            print("waiting", flush=True)
            time.sleep(600)
        return super().rows(top, bottom)


def main() -> None:
    torch.set_num_threads(1)
    job, folder, rank, processes, *kinds = sys.argv[1:]
    store = f"file://{folder}/store"
    timeout = timedelta(minutes=5)
    dist.init_process_group("gloo", store, timeout, rank=int(rank), world_size=int(processes))
    if job == "wait":
        try:
            inlinevit.stream(make_model("deit"), StoppingSource(make_image(64, 64)), group=dist.group.WORLD)
        except RuntimeError as error:
            sys.exit(report_error(error, []))
    if job == "options":
        check_pixels()
        check_refused(Path(folder))
        check_spilled(Path(folder) / "spill")
    for kind in kinds:
        # The first image has too few rows of some kinds for four processes.
        is_low = int(processes) > 3 and kind in LOW
        if is_low:
            refused("has 3 rows of windows, which 4 processes cannot share: use at most 3", kind, SIZES[0])
        for size in SIZES[:1] if job == "fast" else SIZES[is_low:]:
            check_kind(kind, size, chunk_rows=3)
        if job == "all":
            check_kind(kind, SIZES[1])
        if kind not in ("reduced softmax",):
            check_mask(kind)
    print("shared as alone", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
