"""Where labelled images come from: folders, tar files, the embedded set, and what timm.data and torchvision know."""

import gzip
import lzma
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from timm.data import create_dataset

from .config import DataConfig

FASHION_MNIST_CLASSES = [
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
]
# What the parts of a data set are called on disk.
TRAINING_NAMES = ("train", "training")
EVALUATION_NAMES = ("val", "validation", "valid", "eval", "test", "testing")


class ImageSource(Protocol):
    """Labelled images with random access."""

    # Names of the classes, by label; None if they are not known.
    classes: list[str] | None

    def __len__(self) -> int:
        """How many there are."""

    def read(self, index: int) -> tuple[Image.Image, int]:
        """An image, as it is in its file, and its label."""

    def name(self, index: int) -> str:
        """What to call an image that makes trouble."""


class ArraySource:
    """Grey images in memory.

    Args:
        images: (images, height, width), bytes.
        labels: (images,).
        classes: Names of the classes.
    """

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.uint8], classes: list[str]) -> None:
        self.images, self.labels = images, labels
        self.classes: list[str] | None = classes

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """See ImageSource.read."""
        return Image.fromarray(self.images[index]), int(self.labels[index])

    def name(self, index: int) -> str:
        """See ImageSource.name."""
        return f"image {index}"


class ReaderSource:
    """Images behind one of timm's readers: a folder, a tar file, a Hugging Face data set."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader
        labels: dict[str, int] = getattr(reader, "class_to_idx", None) or {}
        self.classes: list[str] | None = sorted(labels, key=lambda name: labels[name]) or None

    def __len__(self) -> int:
        return len(self.reader)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """See ImageSource.read."""
        file, label = self.reader[index][:2]
        return Image.open(file), -1 if label is None else int(label)

    def name(self, index: int) -> str:
        """See ImageSource.name."""
        return str(self.reader.filename(index, absolute=True))


class TorchvisionSource:
    """A torchvision data set."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples
        self.classes: list[str] | None = list(samples.classes) if hasattr(samples, "classes") else None

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """See ImageSource.read."""
        image, label = self.samples[index]
        return image, int(label)

    def name(self, index: int) -> str:
        """See ImageSource.name."""
        return f"image {index} of {type(self.samples).__name__}"


def embedded_fashion_mnist(training: bool) -> ArraySource:
    """The Fashion-MNIST images that come with this package: the first 10,000 for training, the first 2,000 for test."""
    count, part = (10_000, "train") if training else (2_000, "test")
    packed = resources.files(__package__).joinpath("embedded", f"fashion_mnist_{part}.xz").read_bytes()
    content = np.frombuffer(lzma.decompress(packed), np.uint8)
    return ArraySource(content[count:].reshape(count, 28, 28), content[:count], FASHION_MNIST_CLASSES)


def fashion_mnist(folder: Path, training: bool) -> ArraySource:
    """The whole of Fashion-MNIST, from its four files as published."""
    part = "train" if training else "t10k"
    files = [folder / f"{part}-images-idx3-ubyte.gz", folder / f"{part}-labels-idx1-ubyte.gz"]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"no {' and no '.join(missing)}: name the folder with Fashion-MNIST's four .gz files")
    images, labels = (np.frombuffer(gzip.decompress(file.read_bytes()), np.uint8) for file in files)
    return ArraySource(images[16:].reshape(-1, 28, 28), labels[8:], FASHION_MNIST_CLASSES)


def open_source(config: DataConfig, training: bool) -> ImageSource:
    """The labelled images of a data set, for training or for evaluation."""
    source = _open(config, training)
    what = "training" if training else "evaluation"
    if len(source) == 0:
        raise ValueError(f"{config.path} holds no images for {what}: it should hold a folder of images for each class")
    if source.classes is not None and len(source.classes) < 2:
        raise ValueError(
            f"{config.path} holds one class ({source.classes[0]}) for {what}: it should hold a folder for each class, "
            "and at least two"
        )
    return source


def _open(config: DataConfig, training: bool) -> ImageSource:
    path = config.path if training or config.eval_path is None else config.eval_path
    if path == "embedded":
        return embedded_fashion_mnist(training)
    kind, _, folder = path.partition(":")
    if kind == "fashion-mnist" and folder:
        return fashion_mnist(Path(folder), training)
    if path.startswith(("torch/", "hfds/")):
        split = config.train_split if training else config.eval_split
        samples = create_dataset(path, root=config.root, split=split, is_training=training)
        return TorchvisionSource(samples) if path.startswith("torch/") else ReaderSource(samples.reader)
    return _open_files(config, Path(path), training)


def _open_files(config: DataConfig, path: Path, training: bool) -> ImageSource:
    """A folder or a tar file with a folder a class. Labels of both parts are those of the training part."""
    part = find_part(path, TRAINING_NAMES if training else EVALUATION_NAMES)
    if not training and part == path and config.eval_path is None:
        raise ValueError(
            f"{path} has no {', '.join(EVALUATION_NAMES[:3])} or test beside its training images: name the images for "
            "evaluation with --data.eval_path"
        )
    labels = None if training else _labels(find_part(Path(config.path), TRAINING_NAMES))
    try:
        return ReaderSource(create_dataset("", root=str(part), search_split=False, class_map=labels).reader)
    except (RuntimeError, KeyError) as error:
        raise ValueError(f"{part} is no set of labelled images ({error}): it should hold a folder a class") from error


def find_part(path: Path, names: tuple[str, ...]) -> Path:
    """The folder or tar file of one part of a data set; the path itself if it is not divided."""
    if not path.exists():
        raise FileNotFoundError(f"no folder or file at {path}: check --data.path")
    candidates = (path / f"{name}{ending}" for name in names for ending in ("", ".tar"))
    return next((candidate for candidate in candidates if candidate.exists()), path)


def _labels(path: Path) -> dict[str, int] | None:
    """The labels of the classes in a folder or tar file."""
    return create_dataset("", root=str(path), search_split=False).reader.class_to_idx
