"""From images and label maps to batches for training and to single ones for evaluation."""

from operator import itemgetter

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2.functional import pil_to_tensor

from ...data.batch_plan import BatchPlan
from ...data.loader import EvalLoader, ShuffledLoader, TrainLoader
from ...data.samplers import ShardedSampler, check_one_batch
from .ade import AdeSource
from .config import SegmentationAugmentConfig, SegmentationDataConfig
from .transforms import Sample, Transform, as_tensors, as_tv_tensors, training_transform


class SegmentationSamples(Dataset[Sample]):
    """Images to train on, varied at random, with their label maps: (3, crop, crop) and (crop, crop) of bytes.

    Args:
        source: Where they come from.
        transform: How they are varied.
    """

    def __init__(self, source: AdeSource, transform: Transform) -> None:
        self.source, self.transform = source, transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        image, labels = pil_to_tensor(self.source.read_image(index)), self.source.read_labels(index)
        return as_tensors(*self.transform(*as_tv_tensors(image, labels)))


class EvaluationImages(Dataset[tuple[int, Tensor, Tensor]]):
    """Images and label maps as they are, each pair with its index in the source.

    Args:
        source: Where they come from.
    """

    def __init__(self, source: AdeSource) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, pil_to_tensor(self.source.read_image(index)), self.source.read_labels(index)


def collate(samples: list[Sample]) -> Sample:
    """Samples to a batch: (batch, 3, crop, crop) and (batch, crop, crop)."""
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.stack(labels)


def make_train_loader(
    source: AdeSource,
    augment: SegmentationAugmentConfig,
    seed: int,
    plan: BatchPlan,
) -> TrainLoader:
    """Batches (images, labels) of one process, in an order that comes back.

    Args:
        source: Where the images come from.
        augment: How they are varied.
        seed: The run's seed.
        plan: Size of batches, number of workers, which share of each batch.
    """
    order = ShardedSampler(len(source), plan.batch_size, seed=seed, process=plan.process, processes=plan.processes)
    check_one_batch(len(order), len(source), plan.batch_size, plan.processes)
    samples = SegmentationSamples(source, training_transform(augment))
    return ShuffledLoader(samples, order, workers=plan.workers, collate=collate)


def make_eval_loader(source: AdeSource, config: SegmentationDataConfig, process: int, processes: int) -> EvalLoader:
    """Single (index, image, labels) of one process; over all processes, every image comes once.

    An image is (3, height, width) and its labels are (height, width) of bytes, neither resized nor normalised.
    """
    return EvalLoader(
        EvaluationImages(source), 1, workers=config.workers, collate=itemgetter(0), process=process, processes=processes
    )
