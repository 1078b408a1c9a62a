"""From labelled images to batches: reading, timm's augmentation, batches for training and for evaluation."""

import warnings
from typing import Any

import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import transforms

from ..training.data import ShardedOrder, ShuffledData
from .config import AugmentConfig, DataConfig
from .sources import ImageSource

Normalization = tuple[tuple[float, ...], tuple[float, ...]]


class LabelledImages(Dataset[tuple[Tensor, int, str]]):
    """Images as tensors, with their labels and, where one could not be read, what was wrong with it.

    Args:
        source: Where the images come from.
        transform: From a PIL image to a tensor.
        mode: How images are converted: "RGB" or "L".
        num_classes: Labels must be below this.
    """

    def __init__(self, source: ImageSource, transform: Any, mode: str, num_classes: int) -> None:
        self.source, self.transform, self.mode, self.num_classes = source, transform, mode, num_classes

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, int, str]:
        problem = ""
        for offset in range(len(self.source)):
            place = (index + offset) % len(self.source)
            try:
                image, label = self.source.read(place)
                image = image.convert(self.mode)
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
                problem = problem or f"{self.source.name(place)} cannot be read ({error})"
                continue
            if not 0 <= label < self.num_classes:
                raise ValueError(
                    f"{self.source.name(place)} has label {label}, but the model has {self.num_classes} classes: "
                    "set model.num_classes"
                )
            return self.transform(image), label, problem
        raise ValueError(f"not one image can be read: {problem}")


def training_transform(augment: AugmentConfig, size: int, normalization: Normalization) -> Any:
    """timm's augmentation of a training image."""
    mean, std = normalization
    transform = create_transform(
        size,
        is_training=True,
        scale=augment.scale,
        ratio=augment.ratio,
        hflip=augment.hflip,
        color_jitter=augment.color_jitter,
        auto_augment=augment.auto_augment,
        interpolation="bicubic",
        mean=mean,
        std=std,
        re_prob=augment.random_erasing,
        re_mode=augment.random_erasing_mode,
    )
    if augment.scale is None:
        # Small images are not zoomed: a border, then a crop of the full size.
        crop = [transforms.Resize(size), transforms.RandomCrop(size, padding=augment.crop_padding)]
        transform.transforms[:1] = crop
    return transform


def evaluation_transform(size: int, normalization: Normalization, crop_pct: float) -> Any:
    """The middle of an image, at the size of the model's input."""
    mean, std = normalization
    return create_transform(size, interpolation="bicubic", mean=mean, std=std, crop_pct=crop_pct)


class ProblemCounter:
    """Counts images that could not be read, names them, and stops the run when they are too many."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.seen: set[str] = set()

    def check(self, problems: list[str]) -> None:
        """Note the problems of a batch ("" = none)."""
        for problem in problems:
            if problem and problem not in self.seen:
                self.seen.add(problem)
                if len(self.seen) > self.limit:
                    raise ValueError(
                        f"{problem}: remove or mend it, or let {len(self.seen)} or more such images be skipped with "
                        "--data.max_unreadable"
                    )
                warnings.warn(f"{problem} and is skipped ({len(self.seen)} of at most {self.limit})", stacklevel=2)


def collate(samples: list[tuple[Tensor, int, str]]) -> tuple[Tensor, Tensor, list[str]]:
    """Samples to a batch: images, labels, problems."""
    images, labels = default_collate([sample[:2] for sample in samples])
    return images, labels, [problem for _, _, problem in samples]


def training_batches(
    images: LabelledImages, config: DataConfig, repeats: int, seed: int, process: int, processes: int
) -> ShuffledData:
    """Batches of one process, in an order that comes back."""
    length = len(images) if config.train_images is None else min(config.train_images, len(images))
    order = ShardedOrder(
        length, config.batch_size, seed=seed, process=process, processes=processes, repeats=repeats
    )
    return ShuffledData(images, order, workers=config.workers, collate=collate)


def evaluation_batches(images: LabelledImages, config: DataConfig) -> DataLoader[Any]:
    """All images in their order, for accelerate to deal out."""
    return DataLoader(images, batch_size=config.batch_size, num_workers=config.workers, collate_fn=collate)
