"""What the data of detection and segmentation have in common, on the way to training and evaluation."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from inlinevit.data.batch_plan import BatchPlan
from inlinevit.tasks.detection import dataset as detection
from inlinevit.tasks.detection.coco import open_coco
from inlinevit.tasks.detection.config import DetectionAugmentConfig, DetectionDataConfig
from inlinevit.tasks.detection.metrics import DetectionEvaluator
from inlinevit.tasks.detection.transforms import training_transform as detection_transform
from inlinevit.tasks.segmentation import dataset as segmentation
from inlinevit.tasks.segmentation.ade import open_ade
from inlinevit.tasks.segmentation.config import InferenceConfig, SegmentationAugmentConfig, SegmentationDataConfig
from inlinevit.tasks.segmentation.labels import ade_labels
from inlinevit.tasks.segmentation.metrics import SegmentationEvaluator
from inlinevit.tasks.segmentation.transforms import training_transform as segmentation_transform
from tests.tasks.detection.conftest import draw_coco
from tests.tasks.segmentation.conftest import draw_ade

# torch's word on machines with fewer than three cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Data(NamedTuple):
    """14 images of a task: augmented samples, a loader of a batch plan, an evaluator with some workers."""

    source: Any
    samples: Any
    make_loader: Callable[[BatchPlan], Any]
    make_evaluator: Callable[[int], Any]


def detection_data(folder: Path) -> Data:
    config = DetectionDataConfig(path=str(draw_coco(folder, {"train2017": 14})))
    source = open_coco(config, training=True)
    augment = DetectionAugmentConfig(scale_jitter=(0.1, 2.0), jitter_size=48, copy_paste=1.0)
    return Data(
        source,
        detection.DetectionSamples(source, detection_transform(augment), 1.0),
        lambda plan: detection.make_train_loader(source, augment, config, 0, plan),
        lambda workers: DetectionEvaluator(source, workers),
    )


def segmentation_data(folder: Path) -> Data:
    config = SegmentationDataConfig(path=str(draw_ade(folder, {"training": 14})))
    source = open_ade(config, ade_labels(4), training=True)
    augment = SegmentationAugmentConfig(min_size=48, crop_size=32)
    return Data(
        source,
        segmentation.SegmentationSamples(source, segmentation_transform(augment)),
        lambda plan: segmentation.make_train_loader(source, augment, 0, plan),
        lambda workers: SegmentationEvaluator(source, workers, InferenceConfig(), ((0.0,) * 3, (1.0,) * 3)),
    )


@pytest.fixture(scope="module", params=[detection_data, segmentation_data], ids=["detection", "segmentation"])
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Data:
    return request.param(tmp_path_factory.mktemp("data"))


def test_all_that_is_random_comes_from_the_seed_of_torch(data: Data) -> None:
    assert len(data.samples) == 14
    drawn = []
    for number in range(2):
        random.seed(number)
        torch.manual_seed(7)
        drawn.append(data.samples[0])
    torch.testing.assert_close(drawn[0], drawn[1], rtol=0, atol=0)


@pytest.mark.parametrize(("processes", "workers"), [(3, 0), (2, 1)])
def test_evaluation_reads_every_image_once_as_it_is(data: Data, processes: int, workers: int) -> None:
    evaluator, read = data.make_evaluator(workers), []
    for process in range(processes):
        indices = range(process, 14, processes)
        for index, batch in zip(indices, evaluator.loader(process, processes), strict=True):
            torch.testing.assert_close(batch, evaluator[index], rtol=0, atol=0)
            (image,) = (part for part in batch if isinstance(part, torch.Tensor) and part.ndim == 3)
            width, height = data.source.read_image(index).size
            assert (image.dtype, image.shape) == (torch.uint8, (3, height, width))
            read.append(index)
    assert sorted(read) == list(range(14))


def test_too_few_images_are_refused(data: Data) -> None:
    with pytest.raises(ValueError, match=r"14 images for training are fewer than a batch of 8 for each of 2 processes"):
        data.make_loader(BatchPlan.initial(8, processes=2))
