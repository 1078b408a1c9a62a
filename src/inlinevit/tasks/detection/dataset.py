"""From a COCO data set to training batches."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ...data.batch_plan import BatchPlan
from ...data.loader import ShuffledLoader, TrainLoader
from ...data.pixels import image_to_tensor
from ...data.samplers import GroupedSampler, ShardedSampler
from ..backbone import MEAN_COLOR
from .coco import CocoSource
from .config import DetectionAugmentConfig, DetectionDataConfig
from .transforms import Sample, Transform, as_tv_tensors, paste_objects, training_transform


class DetectionSamples(Dataset[Sample]):
    """Augmented training images with their objects.

    Args:
        source: Where they come from.
        transform: The augmentation.
        copy_paste: Probability that an image gets objects of another one, which is augmented in the same way.
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
            sample = paste_objects(sample, other, random_subset(len(other[1]["labels"])))
        return sample

    def draw(self, index: int) -> Sample:
        """Return an augmented image and its objects."""
        image, target = image_to_tensor(self.source.read_image(index)), self.source.read_target(index)
        return self.transform(*as_tv_tensors(image, target))


def random_subset(count: int) -> Tensor:
    """Return a random choice of the numbers below `count`, at least one of them if there is any, in random order."""
    order = torch.randperm(count)
    return order[: 1 + int(torch.randint(count, ()))] if count else order


def collate(samples: list[Sample]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Collate samples to a batch: images of different sizes, and their objects."""
    return [image for image, _ in samples], [target for _, target in samples]


def make_train_loader(
    source: CocoSource,
    augment: DetectionAugmentConfig,
    config: DetectionDataConfig,
    seed: int,
    plan: BatchPlan,
    color: list[int] = MEAN_COLOR,
) -> TrainLoader:
    """Return the batches (images, targets) of one process, in an order that the seed decides; padding has a colour."""
    samples = DetectionSamples(source, training_transform(augment, color), augment.copy_paste)
    order: ShardedSampler
    # All squares of large-scale jitter have the same size.
    if config.group_by_aspect and augment.scale_jitter is None:
        is_landscape = [int(image["width"] >= image["height"]) for image in source.images]
        order = GroupedSampler(is_landscape, plan, seed=seed)
    else:
        order = ShardedSampler(len(source), plan, seed=seed)
    return ShuffledLoader(samples, order, collate=collate)
