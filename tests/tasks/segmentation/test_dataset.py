from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from inlinevit.data.batch_plan import BatchPlan
from inlinevit.tasks.segmentation.ade import AdeSource, open_ade
from inlinevit.tasks.segmentation.config import SegmentationAugmentConfig, SegmentationDataConfig
from inlinevit.tasks.segmentation.dataset import collate, make_train_loader
from inlinevit.tasks.segmentation.labels import IGNORED, ade_labels

# torch's word on machines with fewer than three cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
DrawAde = Callable[..., Path]
SMALL = SegmentationAugmentConfig(min_size=48, crop_size=32)


@pytest.fixture(scope="module")
def source(draw_ade: DrawAde, tmp_path_factory: pytest.TempPathFactory) -> AdeSource:
    folder = draw_ade(tmp_path_factory.mktemp("data") / "ade", {"training": 14})
    return open_ade(SegmentationDataConfig(path=str(folder)), ade_labels(4), training=True)


def batches(source: AdeSource, start: int = 0, **options: Any) -> list[tuple[Tensor, Tensor]]:
    seed = options.pop("seed", 3)
    plan = BatchPlan.initial(options.pop("batch_size", 4), **options)
    return list(make_train_loader(source, SMALL, seed, plan).batches(1, start))


def test_a_batch_is_stacked_squares(source: AdeSource) -> None:
    drawn = batches(source)
    assert len(drawn) == 3
    for images, labels in drawn:
        assert type(images) is type(labels) is Tensor
        assert images.shape == (4, 3, 32, 32)
        assert labels.shape == (4, 32, 32)
        assert images.dtype == labels.dtype == torch.uint8
        assert set(labels.unique().tolist()) <= {0, 1, 2, 3, IGNORED}
    assert {0, 1, 2, 3, IGNORED} == {int(value) for _, labels in drawn for value in labels.unique()}


def test_batches_come_back_from_any_place_whoever_reads_them(source: AdeSource) -> None:
    whole = batches(source)
    torch.testing.assert_close(batches(source, start=1, workers=1), whole[1:], rtol=0, atol=0)
    shares = [batches(source, batch_size=2, process=process, processes=2) for process in range(2)]
    together = [tuple(torch.cat(parts) for parts in zip(*pair, strict=True)) for pair in zip(*shares, strict=True)]
    torch.testing.assert_close(together, whole, rtol=0, atol=0)


def test_another_seed_makes_other_batches(source: AdeSource) -> None:
    first, other = (batches(source, seed=seed)[0] for seed in (3, 4))
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_files_are_named_whoever_reads_them(ade_folder: DrawAde, workers: int) -> None:
    folder = ade_folder({"training": 4})
    source = open_ade(SegmentationDataConfig(path=str(folder)), ade_labels(4), training=True)
    mask = folder / "annotations" / "training" / "0002.png"
    Image.open(mask).convert("RGB").save(mask)
    with pytest.raises(ValueError, match=r"annotations/training/0002.png is not a label map .* RGB\): convert it"):
        batches(source, workers=workers)
    (folder / "images" / "training" / "0002.png").write_bytes(b"nothing")
    with pytest.raises(
        ValueError, match=r"images/training/0002.png cannot be used \(it is not an image\): copy it again"
    ):
        batches(source, workers=workers)


def test_collate_stacks() -> None:
    images, labels = collate([(torch.full((3, 2, 2), number), torch.full((2, 2), number)) for number in (1, 2)])
    assert images[:, 0, 0, 0].tolist() == labels[:, 0, 0].tolist() == [1, 2]
