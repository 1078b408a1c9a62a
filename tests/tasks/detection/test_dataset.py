from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inlinevit.data.batch_plan import BatchPlan
from inlinevit.data.loader import ShuffledLoader
from inlinevit.data.samplers import GroupedSampler
from inlinevit.tasks.detection.coco import CocoSource, open_coco
from inlinevit.tasks.detection.config import DetectionAugmentConfig, DetectionDataConfig
from inlinevit.tasks.detection.dataset import DetectionSamples, collate, make_train_loader, random_subset
from inlinevit.tasks.detection.transforms import training_transform

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    # torch's word on machines with fewer than three cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
DrawCoco = Callable[..., Path]
SMALL = DetectionAugmentConfig(min_sizes=[32, 48], max_size=80)


@pytest.fixture(scope="module")
def source(draw_coco: DrawCoco, tmp_path_factory: pytest.TempPathFactory) -> CocoSource:
    folder = draw_coco(tmp_path_factory.mktemp("data") / "coco", {"train2017": 14})
    return open_coco(DetectionDataConfig(path=str(folder)), training=True)


def batches(
    source: CocoSource, augment: DetectionAugmentConfig = SMALL, start: int = 0, **options: Any
) -> list[tuple[list[Tensor], list[dict[str, Tensor]]]]:
    dealing = {"process": options.pop("process", 0), "processes": options.pop("processes", 1)}
    config = DetectionDataConfig(**{"batch_size": 4, "workers": 0} | options)
    plan = BatchPlan.initial(config.batch_size, workers=config.workers, **dealing)
    return list(make_train_loader(source, augment, config, 3, plan).batches(1, start))


def test_a_batch_is_images_and_targets_of_their_own_sizes(source: CocoSource) -> None:
    drawn = batches(source)
    assert len(drawn) == 3
    for images, targets in drawn:
        assert len(images) == len(targets) == 4
        for image, target in zip(images, targets, strict=True):
            assert {type(values) for values in (image, *target.values())} == {Tensor}
            assert image.dtype == torch.uint8
            assert min(image.shape[1:]) in (31, 32, 47, 48)
            assert set(target) == {"boxes", "labels", "masks"}
            assert target["masks"].shape == (len(target["labels"]), *image.shape[1:])


AUGMENTS = [
    SMALL,
    DetectionAugmentConfig(min_sizes=[32, 48], copy_paste=0.5),
    DetectionAugmentConfig(scale_jitter=(0.1, 2.0), jitter_size=48, copy_paste=1.0),
]


@pytest.mark.parametrize("augment", AUGMENTS)
def test_batches_come_back_from_any_place_whoever_reads_them(
    source: CocoSource, augment: DetectionAugmentConfig
) -> None:
    whole = batches(source, augment)
    torch.testing.assert_close(batches(source, augment, start=1, workers=1), whole[1:], rtol=0, atol=0)
    shares = [batches(source, augment, batch_size=2, process=process, processes=2) for process in range(2)]
    together = [
        tuple(first + second for first, second in zip(*pair, strict=True)) for pair in zip(*shares, strict=True)
    ]
    torch.testing.assert_close(together, whole, rtol=0, atol=0)


def test_upright_and_lying_images_keep_to_themselves(source: CocoSource) -> None:
    # 5 of 96 × 64 and 4 squares, which count as lying; 5 of 64 × 96.
    lying = [[image.shape[2] >= image.shape[1] for image in images] for images, _ in batches(source, batch_size=2)]
    assert len(lying) == 7
    assert sum(len(set(shapes)) > 1 for shapes in lying) == 1
    mixed = [
        [image.shape[2] >= image.shape[1] for image in images]
        for images, _ in batches(source, batch_size=2, group_by_aspect=False)
    ]
    assert sum(len(set(shapes)) > 1 for shapes in mixed) > 1


def test_squares_are_not_grouped(source: CocoSource) -> None:
    jitter = DetectionAugmentConfig(scale_jitter=(0.5, 1.0), jitter_size=48)
    orders = [
        make_train_loader(source, augment, DetectionDataConfig(), 0, BatchPlan.initial(2))
        for augment in (SMALL, jitter)
    ]
    assert all(isinstance(data, ShuffledLoader) for data in orders)
    assert [isinstance(data.sampler, GroupedSampler) for data in orders] == [True, False]


def test_copy_paste_brings_objects_of_other_images(source: CocoSource) -> None:
    augment = DetectionAugmentConfig(min_sizes=[48], hflip=0)
    alone = DetectionSamples(source, training_transform(augment), 0.0)
    pasted = DetectionSamples(source, training_transform(augment), 1.0)
    # The last image is without objects of its own.
    last = len(source) - 1
    assert len(alone[last][1]["labels"]) == 0
    counts = []
    for seed in range(20):
        torch.manual_seed(seed)
        counts.append(len(pasted[last][1]["labels"]))
    assert max(counts) > 1
    assert sum(count > 0 for count in counts) > 15
    half = DetectionSamples(source, training_transform(augment), 0.5)
    torch.manual_seed(0)
    changed = [not torch.equal(half[last][0], alone[last][0]) for _ in range(60)]
    assert 15 < sum(changed) < 45


def test_some_are_chosen_and_never_none() -> None:
    torch.manual_seed(0)
    drawn = [random_subset(3).tolist() for _ in range(200)]
    assert {len(some) for some in drawn} == {1, 2, 3}
    assert {number for some in drawn if len(some) == 1 for number in some} == {0, 1, 2}
    assert all(len(set(some)) == len(some) for some in drawn)
    assert random_subset(0).tolist() == []


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_named_whoever_reads_it(coco_folder: DrawCoco, workers: int) -> None:
    folder = coco_folder({"train2017": 4})
    source = open_coco(DetectionDataConfig(path=str(folder)), training=True)
    (folder / "train2017" / "0002.png").write_bytes(b"nothing")
    with pytest.raises(
        ValueError, match=r"0002.png \(image id 16\) cannot be used \(it is not an image\): copy it again"
    ):
        batches(source, workers=workers)


def test_collate_keeps_samples_apart() -> None:
    samples = [(torch.zeros(3, 2, side), {"labels": torch.ones(side)}) for side in (1, 2)]
    images, targets = collate(samples)
    assert [image.shape[2] for image in images] == [1, 2]
    assert [len(target["labels"]) for target in targets] == [1, 2]
