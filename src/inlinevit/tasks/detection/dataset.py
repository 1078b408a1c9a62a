"""From a COCO data set to batches for training and to images for evaluation."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2.functional import pil_to_tensor

from ...data.batch_plan import BatchPlan
from ...data.loader import EvalLoader, ShuffledLoader, TrainLoader
from ...data.samplers import GroupedSampler, ShardedSampler, check_one_batch
from .coco import CocoSource
from .config import DetectionAugmentConfig, DetectionDataConfig
from .transforms import Sample, Transform, as_tensors, as_tv_tensors, paste_objects, training_transform


class DetectionSamples(Dataset[Sample]):
    """Images to train on, varied at random, with their objects.

    Args:
        source: Where they come from.
        transform: How they are varied.
        copy_paste: Share of images that get objects of another one, which is varied in the same way.
    """

    def __init__(self, source: CocoSource, transform: Transform, copy_paste: float) -> None:
        self.source, self.transform, self.copy_paste = source, transform, copy_paste

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        sample = self.draw(index)
        if float(torch.rand(())) < self.copy_paste and len(self) > 1:
            others = len(self) - 1
            other = self.draw((index + 1 + int(torch.randint(others, ()))) % len(self))
            sample = paste_objects(sample, other, some_of(len(other[1]["labels"])))
        return sample

    def draw(self, index: int) -> Sample:
        """An image alone, varied, and its objects."""
        image, target = pil_to_tensor(self.source.read_image(index)), self.source.read_target(index)
        return as_tensors(*self.transform(*as_tv_tensors(image, target)))


def some_of(count: int) -> Tensor:
    """Some of so many numbers from 0 on, at least one of them if there is any, in random order."""
    order = torch.randperm(count)
    return order[: 1 + int(torch.randint(count, ()))] if count else order


class EvaluationImages(Dataset[tuple[int, Tensor]]):
    """Images as they are, each with its index in the source.

    Args:
        source: Where they come from.
    """

    def __init__(self, source: CocoSource) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, pil_to_tensor(self.source.read_image(index))


def collate(samples: list[Sample]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Samples to a batch: images of different sizes, and their objects."""
    return [image for image, _ in samples], [target for _, target in samples]


def alone(samples: list[Any]) -> Any:
    """A batch of one sample is the sample."""
    (sample,) = samples
    return sample


def make_train_loader(
    source: CocoSource,
    augment: DetectionAugmentConfig,
    config: DetectionDataConfig,
    seed: int,
    plan: BatchPlan,
) -> TrainLoader:
    """Batches (images, targets) of one process, in an order that comes back.

    Args:
        source: Where the images come from.
        augment: How they are varied.
        config: Whether images are grouped.
        seed: The run's seed.
        plan: Size of batches, number of workers, which share of each batch.
    """
    samples = DetectionSamples(source, training_transform(augment), augment.copy_paste)
    order: ShardedSampler
    dealing = {"seed": seed, "process": plan.process, "processes": plan.processes}
    # Squares of large-scale jitter are all alike.
    if config.group_by_aspect and augment.scale_jitter is None:
        lying = [int(source.aspect(index) >= 1) for index in range(len(source))]
        total_batch = plan.initial_batch_size * plan.initial_processes
        order = GroupedSampler(lying, plan.batch_size, total_batch=total_batch, **dealing)
    else:
        order = ShardedSampler(len(source), plan.batch_size, **dealing)
    check_one_batch(len(order), len(source), plan.batch_size, plan.processes)
    return ShuffledLoader(samples, order, workers=plan.workers, collate=collate)


def make_eval_loader(source: CocoSource, config: DetectionDataConfig, process: int, processes: int) -> EvalLoader:
    """Images (index, image) of one process, one at a time; over all processes, every image comes once.

    An image is (3, height, width) of bytes, neither resized nor normalised.
    """
    return EvalLoader(
        EvaluationImages(source), 1, workers=config.workers, collate=alone, process=process, processes=processes
    )
