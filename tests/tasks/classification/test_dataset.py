import io
import tarfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from inlinevit.data.batch_plan import BatchPlan
from inlinevit.data.loader import TrainLoader
from inlinevit.tasks.classification.config import AugmentConfig, ClassificationDataConfig
from inlinevit.tasks.classification.dataset import (
    NO_LABEL,
    LabelledImages,
    UnreadableCounter,
    make_eval_loader,
    make_train_loader,
)
from inlinevit.tasks.classification.shards import ShardSource
from inlinevit.tasks.classification.sources import ArraySource, ImageSource, open_source
from inlinevit.tasks.classification.transforms import InputSpec, evaluation_transform, training_transform
from inlinevit.utils import memory

Batch = tuple[Tensor, Tensor, list[str]]
SPEC = InputSpec(size=16, mean=(0.5,) * 3, std=(0.25,) * 3, interpolation="bicubic", crop_pct=1.0, crop_mode="center")
# All that draws at random: cropping, mirroring, RandAugment, erasing with random pixels.
AUGMENT = AugmentConfig(random_erasing=0.9, auto_augment="rand-m9-mstd0.5-inc1")
IMAGES = 26


def encoded(number: int, kind: str = "JPEG", size: tuple[int, int] = (24, 20)) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def make_data(folder: Path, kind: str, replaced: dict[int, bytes] | None = None) -> ImageSource | ShardSource:
    """Images with labels 0, 1, 2, … in turn, some with other contents."""
    contents = {number: encoded(number) for number in range(IMAGES)} | (replaced or {})
    if kind == "stream":
        for shard in range(3):
            with tarfile.open(folder / f"train-{shard}.tar", "w") as archive:
                for number in range(shard, IMAGES, 3):
                    add(archive, f"{number}.jpg", contents[number])
                    add(archive, f"{number}.cls", str(number % 5).encode())
        return open_source(ClassificationDataConfig(path=f"wds/{folder}"), training=True)
    for number, content in contents.items():
        file = folder / str(number % 5) / f"{number}.jpg"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
    # With data for evaluation, nothing is held out.
    return open_source(ClassificationDataConfig(path=str(folder), eval_path=str(folder)), training=True)


def training(source: ImageSource | ShardSource, workers: int = 0, repeats: int = 1, **options: Any) -> TrainLoader:
    processes = {"process": options.pop("process", 0), "processes": options.pop("processes", 1)}
    config = ClassificationDataConfig(**{"batch_size": 4, "workers": workers, **options})
    transform = training_transform(AUGMENT, SPEC)
    plan = BatchPlan.initial(config.batch_size, workers=workers, **processes)
    return make_train_loader(source, transform, SPEC.pixel_format, 5, config, repeats, 11, plan)


def evaluation(
    source: ImageSource | ShardSource, process: int = 0, processes: int = 1, classes: int = 5, workers: int = 0
) -> list[Batch]:
    config = ClassificationDataConfig(batch_size=4, workers=workers)
    transform = evaluation_transform(SPEC)
    return list(make_eval_loader(source, transform, SPEC.pixel_format, classes, config, process, processes))


def damaged(kind: str) -> bytes:
    whole = encoded(0)
    match kind:
        case "truncated":
            return whole[: len(whole) // 2]
        case "text":
            return b"no image at all"
        case "empty":
            return b""
        case "tiny":
            return encoded(0, "PNG", (1, 1))
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["folder", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
def test_augmented_batches_come_back_from_the_middle_of_an_epoch(tmp_path: Path, kind: str, workers: int) -> None:
    source = make_data(tmp_path, kind)
    whole = list(training(source, workers, repeats=2).batches(3, 0))
    rest = list(training(source, workers, repeats=2).batches(3, 2))
    assert len(whole) == 6
    assert whole[0][0].shape == (4, 3, 16, 16)
    assert whole[0][0].dtype == torch.float32
    assert whole[0][1].dtype == torch.int64
    assert not torch.equal(whole[0][0][0], whole[0][0][1]), "the same image twice, but augmented again"
    torch.testing.assert_close(rest, whole[2:], rtol=0, atol=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_cached_images_are_decoded_once_and_stay_as_they_are(tmp_path: Path, workers: int) -> None:
    source = make_data(tmp_path, "folder", {number: damaged("text") for number in (3, 8)})
    plain, cached = (training(source, workers, repeats=2, max_unreadable=2, cache=cache) for cache in (False, True))

    def assert_equal(found: list[Batch], expected: list[Batch]) -> None:
        for (images, labels, problems), (own, own_labels, own_problems) in zip(found, expected, strict=True):
            assert torch.equal(images, own)
            assert torch.equal(labels, own_labels)
            assert problems == own_problems

    for epoch in range(3):
        # The batches are augmented, which must not change what is kept.
        assert_equal(list(cached.batches(epoch, 0)), list(plain.batches(epoch, 0)))
    expected = list(plain.batches(0, 0))
    for file in tmp_path.rglob("*.jpg"):
        file.write_bytes(damaged("text"))
    if workers == 0:
        assert_equal(list(cached.batches(0, 0)), expected)


def test_a_cache_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 26 images of 24 × 20 pixels in three colours.
    needed = IMAGES * 24 * 20 * 3
    source = make_data(tmp_path, "folder")
    monkeypatch.setattr(memory, "available_memory", lambda: needed)
    training(source, cache=True)
    with pytest.raises(
        ValueError, match=r"^a cache of all training images \(data\.cache\) .*: leave it out, or use fewer"
    ):
        training(source, workers=2, cache=True)
    monkeypatch.setattr(memory, "available_memory", lambda: needed - 1)
    with pytest.raises(ValueError, match=r"data\.cache"):
        training(source, cache=True)
    training(source)
    # Only some of the images are used.
    training(source, cache=True, max_train_samples=20)


def test_shards_have_no_cache(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data\.cache keeps images .* shards are read sequentially: leave it out$"):
        training(make_data(tmp_path, "stream"), cache=True)


def test_two_processes_see_what_one_sees(tmp_path: Path) -> None:
    source = make_data(tmp_path, "folder")
    alone = list(training(source, batch_size=8).batches(0, 0))
    drawn = [list(training(source, process=process, processes=2).batches(0, 0)) for process in range(2)]
    for whole, one, other in zip(alone, *drawn, strict=True):
        torch.testing.assert_close(whole[0], torch.cat([one[0], other[0]]), rtol=0, atol=0)
        assert torch.equal(whole[1], torch.cat([one[1], other[1]]))


@pytest.mark.parametrize("kind", ["folder", "stream"])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_evaluation_counts_every_image_once(tmp_path: Path, kind: str, processes: int) -> None:
    source = make_data(tmp_path, kind)
    batches = [batch for process in range(processes) for batch in evaluation(source, process, processes)]
    images = torch.cat([batch[0] for batch in batches])
    labels = torch.cat([batch[1] for batch in batches])
    assert labels.bincount().tolist() == [6, 5, 5, 5, 5]
    assert len(images.flatten(1).unique(dim=0)) == IMAGES


@pytest.mark.parametrize("kind", ["folder", "stream"])
@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "tiny"])
def test_the_first_image_that_cannot_be_used_stops_the_run(tmp_path: Path, kind: str, damage: str) -> None:
    source = make_data(tmp_path, kind, {7: damaged(damage)})
    counter = UnreadableCounter(0)
    problems = [problem for batch in evaluation(source) for problem in batch[2]]
    assert len(problems) == 1
    with pytest.raises(ValueError, match=r"--data\.max_unreadable 1 or more") as caught:
        counter.check(problems)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("7 in " if kind == "stream" else str(tmp_path / "2" / "7.jpg"))
    if damage == "tiny":
        assert "1 × 1 pixels" in message


@pytest.mark.parametrize("kind", ["folder", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
def test_images_that_cannot_be_used_are_replaced_in_training(tmp_path: Path, kind: str, workers: int) -> None:
    source = make_data(tmp_path, kind, {number: damaged("text") for number in (3, 8, 13)})
    data = training(source, workers, max_unreadable=3)
    counter = UnreadableCounter(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(3):
            for _, labels, problems in data.batches(epoch, 0):
                assert len(labels) == 4
                assert labels.min() >= 0
                counter.check(problems)
    told = [str(warning.message) for warning in caught if "skipped" in str(warning.message)]
    assert len(told) == 3, "each image is named once"
    assert told[-1].endswith("3 of at most 3")


@pytest.mark.parametrize("kind", ["folder", "stream"])
def test_images_that_cannot_be_used_have_no_label_in_evaluation(tmp_path: Path, kind: str) -> None:
    source = make_data(tmp_path, kind, {number: damaged("truncated") for number in (3, 8)})
    batches = evaluation(source)
    labels = torch.cat([batch[1] for batch in batches])
    assert len(labels) == IMAGES
    assert (labels == NO_LABEL).sum() == 2
    assert labels[labels != NO_LABEL].bincount().tolist() == [6, 5, 5, 3, 5]
    assert all(len(batch[0]) == len(batch[1]) for batch in batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_only_images_that_cannot_be_used(tmp_path: Path, workers: int) -> None:
    source = make_data(tmp_path, "folder", {number: damaged("text") for number in range(IMAGES)})
    with pytest.raises(ValueError, match=r"^not one of 26 images in a row can be used, and .*check the data$"):
        next(training(source, workers, max_unreadable=100).batches(0, 0))
    # With a lower limit, no more are tried than are needed to know.
    _, labels, problems = next(training(source, workers, max_unreadable=1).batches(0, 0))
    assert set(labels.tolist()) == {NO_LABEL}
    with pytest.warns(UserWarning, match="1 of at most 1"), pytest.raises(ValueError, match="2 or more"):
        UnreadableCounter(1).check(problems)


def test_labels_out_of_range_are_problems(tmp_path: Path) -> None:
    batches = evaluation(make_data(tmp_path, "folder"), classes=4)
    problems = [problem for batch in batches for problem in batch[2]]
    assert len(problems) == 5
    assert problems[0] == f"{tmp_path / '4' / '4.jpg'} cannot be used (its label is 4, but the model has 4 classes)"
    assert sum(int((batch[1] == NO_LABEL).sum()) for batch in batches) == 5


@pytest.mark.parametrize("limit", [1_000, 2_000], ids=["Pillow refuses", "Pillow only warns"])
def test_decompression_bombs_are_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    source = make_data(tmp_path, "folder", {7: encoded(7, "PNG", (60, 60))})
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    problems = [problem for batch in evaluation(source) for problem in batch[2]]
    assert len(problems) == 1
    assert problems[0].startswith(str(tmp_path / "2" / "7.jpg"))
    assert "decompression bomb" in problems[0]


def test_too_few_images_for_a_batch(tmp_path: Path) -> None:
    for kind in ("folder", "stream"):
        (tmp_path / kind).mkdir()
        source = make_data(tmp_path / kind, kind)
        with pytest.raises(ValueError, match=r"26 images .* fewer than a batch of 16 for each of 2 processes"):
            training(source, batch_size=16, processes=2)


def test_some_of_the_images(tmp_path: Path) -> None:
    for kind in ("folder", "stream"):
        (tmp_path / kind).mkdir()
        source = make_data(tmp_path / kind, kind)
        assert len(training(source, max_train_samples=13)) == 3
        assert len(training(source, max_train_samples=1000)) == 6
    # Images are sorted by class, and each class keeps its proportion.
    data = training(
        open_source(ClassificationDataConfig(path=str(tmp_path / "folder")), training=True), max_train_samples=20
    )
    labels = torch.cat([batch[1] for batch in data.batches(0, 0)])
    assert labels.bincount().tolist() == [5, 4, 4, 4, 3]


def test_the_next_image_takes_the_place_of_one_that_cannot_be_used() -> None:
    images = np.zeros((4, 6, 6), np.uint8)
    source = ArraySource(images, np.array([0, 9, 9, 1], np.uint8), ["a", "b"], "test")
    samples = LabelledImages(source, evaluation_transform(SPEC), SPEC.pixel_format, 2, tries=3)
    _, label, problems = samples[1]
    assert label == 1
    assert [problem.split(" cannot")[0] for problem in problems] == ["image 1 of test", "image 2 of test"]
    assert samples[3][1:] == (1, [])
