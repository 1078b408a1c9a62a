"""From images and label maps to training batches."""

import torch
from torch.utils.data import Dataset
from torchvision.tv_tensors import Image, Mask

from ...data.batch_plan import BatchPlan
from ...data.loader import ShuffledLoader, TrainLoader
from ...data.pixels import image_to_tensor
from ...data.samplers import ShardedSampler
from ..backbone import MEAN_COLOR
from .ade import AdeSource
from .config import SegmentationAugmentConfig
from .transforms import Sample, Transform, training_transform


class SegmentationSamples(Dataset[Sample]):
    """Augmented training images with their label maps: (channels, crop, crop) and (crop, crop) uint8.

    Args:
        source: Where they come from.
        transform: The augmentation.
    """

    def __init__(self, source: AdeSource, transform: Transform) -> None:
        self.source, self.transform = source, transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        image, labels = image_to_tensor(self.source.read_image(index)), self.source.read_labels(index)
        return self.transform(Image(image), Mask(labels))


def collate(samples: list[Sample]) -> Sample:
    """Collate samples to a batch: (batch, channels, crop, crop) and (batch, crop, crop)."""
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.stack(labels)


def make_train_loader(
    source: AdeSource,
    augment: SegmentationAugmentConfig,
    seed: int,
    plan: BatchPlan,
    color: list[int] = MEAN_COLOR,
) -> TrainLoader:
    """Return the batches (images, labels) of one process, in an order that the seed decides.

    Args:
        source: The images.
        augment: Their augmentation.
        seed: Decides the order.
        plan: The batches of all processes.
        color: Of padding, by channel.
    """
    samples = SegmentationSamples(source, training_transform(augment, color))
    return ShuffledLoader(samples, ShardedSampler(len(source), plan, seed=seed), collate=collate)
