"""From images and label maps to training batches."""

import torch
from torch.utils.data import Dataset
from torchvision.transforms.v2.functional import pil_to_tensor
from torchvision.tv_tensors import Image, Mask

from ...data.batch_plan import BatchPlan
from ...data.loader import ShuffledLoader, TrainLoader
from ...data.samplers import ShardedSampler
from .ade import AdeSource
from .config import SegmentationAugmentConfig
from .transforms import Sample, Transform, training_transform


class SegmentationSamples(Dataset[Sample]):
    """Augmented training images with their label maps: (3, crop, crop) and (crop, crop) uint8.

    Args:
        source: Where they come from.
        transform: The augmentation.
    """

    def __init__(self, source: AdeSource, transform: Transform) -> None:
        self.source, self.transform = source, transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        image, labels = pil_to_tensor(self.source.read_image(index)), self.source.read_labels(index)
        return self.transform(Image(image), Mask(labels))


def collate(samples: list[Sample]) -> Sample:
    """Collate samples to a batch: (batch, 3, crop, crop) and (batch, crop, crop)."""
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.stack(labels)


def make_train_loader(source: AdeSource, augment: SegmentationAugmentConfig, seed: int, plan: BatchPlan) -> TrainLoader:
    """Return the batches (images, labels) of one process, in an order that the seed decides."""
    samples = SegmentationSamples(source, training_transform(augment))
    return ShuffledLoader(samples, ShardedSampler(len(source), plan, seed=seed), collate=collate)
