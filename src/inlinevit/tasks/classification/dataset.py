"""From labelled images to batches for training and for evaluation."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ...data.batch_plan import BatchPlan
from ...data.images import decode_image, decompression_bomb_limit, describe_image_error
from ...data.loader import EvalLoader, ShuffledLoader, StreamLoader, TrainLoader
from ...data.pixels import AnyImage, PixelFormat
from ...data.samplers import ShardedSampler
from ...utils.memory import require_memory
from ...utils.validation import require
from .config import ImageDataConfig
from .shards import ShardImages, ShardSource
from .sources import ImageSource, take_subset

# The label of an image that cannot be used.
NO_LABEL = -1
CACHE = "a cache of all training images (data.cache)"

# An image as a tensor, its label, and what was wrong with images that could not be used.
Sample = tuple[Tensor, int, list[str]]


class LabelledImages(Dataset[Sample]):
    """Images as tensors, with their labels.

    An image that cannot be used is a problem, which is returned with the sample for `UnreadableCounter`. It is replaced
    by the next image that can be used or, if there is none among those tried, by a black one without a label.

    Args:
        source: Where the images come from.
        transform: From a PIL image to a tensor.
        pixel_format: The bands and values that the model gets.
        num_targets: Labels must be below this: the number of classes, or of rows in a table of targets.
        tries: How many images to try; 1 = never take another one.
        max_pixels: Images with more pixels cannot be used; None = Pillow's limit.
        cache: Whether to keep decoded images in memory.
    """

    def __init__(
        self,
        source: ImageSource,
        transform: Any,
        pixel_format: PixelFormat,
        num_targets: int,
        tries: int = 1,
        max_pixels: int | None = None,
        cache: bool = False,
    ) -> None:
        self.source, self.transform, self.pixel_format = source, transform, pixel_format
        self.num_targets, self.tries, self.max_pixels = num_targets, tries, max_pixels
        # Decoded images and their labels by index; None = not kept.
        self.decoded: dict[int, tuple[AnyImage, int]] | None = {} if cache else None

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        problems: list[str] = []
        for offset in range(min(self.tries, len(self))):
            place = (index + offset) % len(self)
            try:
                image, label = self.load(place)
            # A broken file can make Pillow raise anything.
            except Exception as error:
                problems.append(describe_image_error(self.source.name(place), error))
                continue
            return self.transform(image), label, problems
        if self.tries > len(self):
            raise ValueError(f"not one of {len(self)} images in a row can be used, and {problems[0]}: check the data")
        return self.transform(self.pixel_format.blank()), NO_LABEL, problems

    def load(self, index: int) -> tuple[AnyImage, int]:
        """Return a decoded image and its label; any error means that the image cannot be used."""
        if self.decoded is None:
            return self.decode(index)
        if index not in self.decoded:
            self.decoded[index] = self.decode(index)
        return self.decoded[index]

    def decode(self, index: int) -> tuple[AnyImage, int]:
        """Do the same without the cache."""
        with decompression_bomb_limit(self.max_pixels):
            opened, label = self.source.read(index)
            with opened:
                image = decode_image(opened, self.pixel_format)
        if not 0 <= label < self.num_targets:
            raise ValueError(f"its label is {label}, but the model has {self.num_targets} classes")
        return image, label

    def check_cache(self, copies: int) -> None:
        """Refuse a cache that does not fit into memory, if all images are as large as the first.

        Args:
            copies: Processes that keep all images.
        """
        try:
            image, _ = self.decode(0)
        # It is reported when it is its turn.
        except Exception:
            return
        width, height = image.size
        needed = copies * len(self) * width * height * self.pixel_format.channels
        require_memory(needed, CACHE, "leave it out, or use fewer --data.workers, each of which has a cache")


class NamedImages(Dataset[tuple[Sample, str]]):
    """Labelled images, each with its name."""

    def __init__(self, images: LabelledImages) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Sample, str]:
        return self.images[index], self.images.source.name(index)


class LabelledStream:
    """Shards as a stream of labelled images; further arguments as for LabelledImages.

    With `named`, each image comes with its name.
    """

    def __init__(self, source: ShardSource, *arguments: Any, named: bool = False) -> None:
        self.lengths, self.read, self.arguments, self.named = source.lengths, source.read, arguments, named

    def samples(self, stored: list[dict[str, Any]]) -> LabelledImages | NamedImages:
        images = LabelledImages(ShardImages(stored), *self.arguments)
        return NamedImages(images) if self.named else images


class UnreadableCounter:
    """Counts and reports the images that one process cannot use, and stops the run when they exceed the limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.seen: set[str] = set()

    def check(self, problems: list[str]) -> None:
        """Count the problems of a batch."""
        for problem in problems:
            if problem not in self.seen:
                self.seen.add(problem)
                count = len(self.seen)
                if count > self.limit:
                    raise ValueError(
                        f"{problem}: remove or fix it, or let it be skipped with --data.max_unreadable {count} or more"
                    )
                warnings.warn(f"{problem} and is skipped: {count} of at most {self.limit}", stacklevel=2)


def collate(samples: list[Sample]) -> tuple[Tensor, Tensor, list[str]]:
    """Collate samples to a batch: images (batch, channels, height, width), labels (batch,), problems."""
    images, labels, problems = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels), [problem for several in problems for problem in several]


def collate_named(samples: list[tuple[Sample, str]]) -> tuple[Tensor, Tensor, list[str], list[str]]:
    """Collate samples with names to a batch: images, labels and problems as by `collate`, and names."""
    return *collate([sample for sample, _ in samples]), [name for _, name in samples]


def drop_unreadable(
    batches: Iterable[tuple[Tensor, Tensor, list[str]]], counter: UnreadableCounter, labels: Sequence[int] | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Remove unreadable images from batches, and map labels to those of the model.

    Args:
        batches: Images (batch, channels, height, width), labels (batch,) with NO_LABEL for unreadable images, problems.
        counter: Counts the problems.
        labels: For each label, that of the model; None = they are the same.
    """
    own = None if labels is None else torch.tensor(labels)
    for images, truth, problems in batches:
        counter.check(problems)
        is_readable = truth >= 0
        if is_readable.any():
            truth = truth[is_readable]
            yield images[is_readable], truth if own is None else own[truth]


def make_train_loader(
    source: ImageSource | ShardSource,
    transform: Any,
    pixel_format: PixelFormat,
    num_targets: int,
    config: ImageDataConfig,
    repeats: int,
    seed: int,
    plan: BatchPlan,
) -> TrainLoader:
    """Return the batches (images, labels, problems) of one process, in a reproducible order.

    Arguments as for LabelledImages and ShardedSampler; the config says how many images to use.
    """
    # Once more images than allowed were tried in vain, the run stops anyway.
    tries = config.max_unreadable + 1
    chosen = source if config.max_train_samples is None else take_subset(source, config.max_train_samples)
    if isinstance(chosen, ShardSource):
        require(
            not config.cache,
            "data.cache keeps images that are read in any order, but shards are read sequentially: leave it out",
        )
        stream = LabelledStream(chosen, transform, pixel_format, num_targets, tries, config.max_pixels)
        return StreamLoader(stream, plan, seed=seed, repeats=repeats, collate=collate)
    images = LabelledImages(chosen, transform, pixel_format, num_targets, tries, config.max_pixels, config.cache)
    if config.cache:
        images.check_cache(max(1, plan.workers))
    sampler = ShardedSampler(len(images), plan, seed=seed, repeats=repeats)
    return ShuffledLoader(images, sampler, collate=collate)


def make_eval_loader(
    source: ImageSource | ShardSource,
    transform: Any,
    pixel_format: PixelFormat,
    num_targets: int,
    config: ImageDataConfig,
    process: int,
    processes: int,
    named: bool = False,
) -> EvalLoader:
    """Return the batches (images, labels, problems) of one process; over all processes, every image comes once.

    An image that cannot be used is a black one with label NO_LABEL. With `named`, batches have the indices and the
    names of images, too: (indices, (images, labels, problems, names)).
    """
    arguments = transform, pixel_format, num_targets, 1, config.max_pixels
    images: LabelledImages | NamedImages | LabelledStream
    if isinstance(source, ShardSource):
        images = LabelledStream(source, *arguments, named=named)
    else:
        images = LabelledImages(source, *arguments)
        images = NamedImages(images) if named else images
    return EvalLoader(
        images,
        config.batch_size,
        workers=config.workers,
        collate=collate_named if named else collate,
        process=process,
        processes=processes,
        numbered=named,
    )
