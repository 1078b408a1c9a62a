"""Where labelled images come from: folders, tar files, the embedded set, torchvision, Hugging Face, WebDataset."""

import gzip
import io
import lzma
import os
import zlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from timm.data import create_dataset
from timm.data.readers.reader_image_folder import find_images_and_targets
from timm.utils.misc import natural_key

from .config import DataConfig
from .shards import ShardSource, find_shards, list_files

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
# Files that are taken for images.
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".jp2")


class ImageSource(Protocol):
    """Labelled images with random access. Reading must work in forked and in spawned processes."""

    # Names of the classes, by label; None if they are not known.
    classes: list[str] | None

    def __len__(self) -> int:
        """How many there are."""

    def read(self, index: int) -> tuple[Image.Image, int]:
        """An image, as it is in its file, and its label; any error means that the image cannot be used."""

    def name(self, index: int) -> str:
        """What to call an image that makes trouble."""


class ArraySource:
    """Grey images in memory.

    Args:
        images: (images, height, width), bytes.
        labels: (images,).
        classes: Names of the classes.
        title: What to call the data set.
    """

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.uint8], classes: list[str], title: str) -> None:
        self.images, self.labels, self.title = images, labels, title
        self.classes: list[str] | None = classes

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """See ImageSource.read."""
        return Image.fromarray(self.images[index]), int(self.labels[index])

    def name(self, index: int) -> str:
        """See ImageSource.name."""
        return f"image {index} of {self.title}"


class FolderSource:
    """A folder of class folders, as timm reads it: the name of an image's folder is its class.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        files, labels = find_images_and_targets(str(folder), types=IMAGE_ENDINGS)
        self.files = files
        self.classes: list[str] | None = list(labels)
        _require_class_folders(folder, self.classes, [file for file, _ in files])

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """See ImageSource.read."""
        file, label = self.files[index]
        return Image.open(file), label

    def name(self, index: int) -> str:
        """See ImageSource.name."""
        return str(self.files[index][0])


class TarSource:
    """A tar file of class folders. Images are read where they lie in it, and nothing stays open.

    Args:
        file: The tar file, not compressed.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        members = [item for item in list_files(file) if item.name.lower().endswith(IMAGE_ENDINGS)]
        members.sort(key=lambda item: natural_key(item.name))
        self.names = [item.name for item in members]
        self.offsets = np.array([(item.offset_data, item.size) for item in members], np.int64).reshape(-1, 2)
        folders = [os.path.basename(os.path.dirname(os.path.normpath(name))) for name in self.names]
        classes = sorted(set(folders), key=natural_key)
        _require_class_folders(file, classes, self.names)
        numbers = {name: label for label, name in enumerate(classes)}
        self.labels = np.array([numbers[folder] for folder in folders], np.int64)
        self.classes: list[str] | None = classes

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """See ImageSource.read."""
        offset, size = self.offsets[index]
        with self.file.open("rb") as stream:
            stream.seek(offset)
            content = stream.read(size)
        return Image.open(io.BytesIO(content)), int(self.labels[index])

    def name(self, index: int) -> str:
        """See ImageSource.name."""
        return f"{self.names[index]} in {self.file}"


def _require_class_folders(path: Path, classes: list[str], names: list[str]) -> None:
    """Refuse images that lie in no class folder, and places without images."""
    if not classes:
        raise ValueError(f"{path} holds no images: it should hold a folder of images for each class")
    if "" in classes:
        loose = next(name for name in names if Path(name).parent in (path, Path()))
        raise ValueError(f"{path} holds images without a class, such as {loose}: put each into the folder of its class")


class TorchvisionSource:
    """A torchvision data set.

    Args:
        samples: The data set.
    """

    def __init__(self, samples: Any) -> None:
        self.samples = samples
        # Some have several names for a class.
        names = [name if isinstance(name, str) else ", ".join(name) for name in getattr(samples, "classes", ())]
        self.classes: list[str] | None = names or None

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """See ImageSource.read."""
        image, label = self.samples[index]
        return image, int(label)

    def name(self, index: int) -> str:
        """See ImageSource.name."""
        return f"image {index} of {type(self.samples).__name__}"


class HuggingFaceSource:
    """A Hugging Face data set with random access: its first column of images, its first column of class labels.

    Args:
        samples: The data set.
        title: What to call it.
    """

    def __init__(self, samples: Any, title: str) -> None:
        import datasets

        kinds = samples.features
        images = [key for key, kind in kinds.items() if isinstance(kind, datasets.Image)]
        labels = [key for key, kind in kinds.items() if isinstance(kind, datasets.ClassLabel)]
        # Without class labels, numbers in a column of this name will do.
        labels += [key for key, kind in kinds.items() if key == "label" and str(kind.dtype).startswith(("int", "uint"))]
        if not images or not labels:
            raise ValueError(
                f"{title} has no column of {'class labels' if images else 'images'} among {', '.join(kinds)}: cast one "
                f"with the data set's {'class_encode_column' if images else 'cast_column'} and save it anew"
            )
        self.title, self.image, self.label = title, images[0], labels[0]
        # Undecoded, so that an image that cannot be read does not stop the others.
        self.samples = samples.select_columns([self.image, self.label]).cast_column(
            self.image, datasets.Image(decode=False)
        )
        label = kinds[self.label]
        self.classes: list[str] | None = list(label.names) if isinstance(label, datasets.ClassLabel) else None

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """See ImageSource.read."""
        row = self.samples[index]
        stored, label = row[self.image], row[self.label]
        if stored is None or label is None:
            raise ValueError("it has no label" if stored else "it is empty")
        file = stored["path"] if stored["bytes"] is None else io.BytesIO(stored["bytes"])
        return Image.open(file), int(label)

    def name(self, index: int) -> str:
        """See ImageSource.name."""
        stored = self.samples[index][self.image]
        path = stored["path"] if stored else None
        return f"image {index} of {self.title}" + (f" ({path})" if path else "")


class RelabelledSource:
    """Images of another source, with the labels that their classes have elsewhere.

    Args:
        source: The other source, which knows its classes.
        classes: Names of the classes, by label.
    """

    def __init__(self, source: ImageSource, classes: Sequence[str]) -> None:
        assert source.classes is not None
        numbers = {name: label for label, name in enumerate(classes)}
        unknown = [name for name in source.classes if name not in numbers]
        if unknown:
            raise ValueError(
                f"the images for evaluation have {len(unknown)} classes that training does not know, such as "
                f"{unknown[0]!r}: remove them, or name the right images with --data.eval_path"
            )
        self.source = source
        self.labels = [numbers[name] for name in source.classes]
        self.classes: list[str] | None = list(classes)

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """See ImageSource.read."""
        image, label = self.source.read(index)
        return image, self.labels[label] if 0 <= label < len(self.labels) else label

    def name(self, index: int) -> str:
        """See ImageSource.name."""
        return self.source.name(index)


class ThinnedSource:
    """Some images of another source, evenly spread over it: where classes lie in a row, each gives its share.

    Args:
        source: The other source.
        count: How many images to take.
    """

    def __init__(self, source: ImageSource, count: int) -> None:
        self.source, self.count = source, min(count, len(source))
        self.classes = source.classes

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> tuple[Image.Image, int]:
        """See ImageSource.read."""
        return self.source.read(self._place(index))

    def name(self, index: int) -> str:
        """See ImageSource.name."""
        return self.source.name(self._place(index))

    def _place(self, index: int) -> int:
        return index * len(self.source) // self.count


def open_source(config: DataConfig, training: bool, classes: Sequence[str] | None = None) -> ImageSource | ShardSource:
    """The labelled images of a data set.

    Args:
        config: Where they are.
        training: Whether those for training or those for evaluation.
        classes: For evaluation, names of the classes by label; None = those of the images for training.
    """
    source = open_part(config, training)
    if training:
        if source.classes is not None and len(source.classes) < 2:
            raise ValueError(
                f"{config.path} holds one class ({source.classes[0]}): it should hold a folder of images for each "
                "class, and at least two"
            )
        return source
    if isinstance(source, ShardSource) or source.classes is None:
        return source
    if classes is None and config.eval_path is None and isinstance(source, ArraySource):
        return source
    if classes is None:
        classes = open_part(config, training=True).classes
    return source if classes is None or list(classes) == source.classes else RelabelledSource(source, classes)


def open_part(config: DataConfig, training: bool) -> ImageSource | ShardSource:
    """The images for training or for evaluation, with labels and classes just as they are found."""
    path = os.path.expanduser(config.path if training or config.eval_path is None else config.eval_path)
    if path == "embedded":
        return embedded_fashion_mnist(training)
    if path.startswith("fashion-mnist:"):
        return fashion_mnist(Path(path.removeprefix("fashion-mnist:")), training)
    split = config.train_split if training else config.eval_split
    kind, _, name = path.partition("/")
    if kind == "torch":
        return open_torchvision(path, config.root, split)
    if kind == "hfds":
        return open_huggingface(name, config.root, split, option="train_split" if training else "eval_split")
    if kind == "hfids":
        raise ValueError(f"{path} would be streamed, which is not supported: use hfds/{name}")
    if kind == "wds":
        names = [split, *(TRAINING_NAMES if training else EVALUATION_NAMES)]
        alone = training or config.eval_path is not None
        return find_shards(str(Path(config.root or "") / name), names, alone)
    part = find_part(Path(path), training, is_eval_path=not training and config.eval_path is not None)
    return FolderSource(part) if part.is_dir() else TarSource(part)


def find_part(path: Path, training: bool, is_eval_path: bool) -> Path:
    """The folder or tar file of one part of a data set; the path itself if it is not divided.

    Args:
        path: The data set.
        training: Which part.
        is_eval_path: Whether the path was given for evaluation alone.
    """
    if not path.exists():
        option = "--data.eval_path" if is_eval_path else "--data.path"
        raise FileNotFoundError(f"no folder or file at {path}: check {option}")
    for_training, for_evaluation = (_first_part(path, names) for names in (TRAINING_NAMES, EVALUATION_NAMES))
    wanted, other = (for_training, for_evaluation) if training else (for_evaluation, for_training)
    if wanted is not None:
        return wanted
    if is_eval_path or (training and other is None):
        return path
    if training:
        raise ValueError(f"{path} has no part called train: name the images for training with --data.path")
    raise ValueError(
        f"{path} has no part called val, validation or test: name the images for evaluation with --data.eval_path"
    )


def _first_part(path: Path, names: tuple[str, ...]) -> Path | None:
    """The first tar file or folder of folders that has one of these names; a folder of images is a class."""
    for name in names:
        if (path / name).is_dir() and any(item.is_dir() for item in (path / name).iterdir()):
            return path / name
        if (path / f"{name}.tar").is_file():
            return path / f"{name}.tar"
    return None


def embedded_fashion_mnist(training: bool) -> ArraySource:
    """The Fashion-MNIST images that come with this package: the first 10,000 for training, the first 2,000 for test."""
    count, part = (10_000, "train") if training else (2_000, "test")
    packed = resources.files(__package__).joinpath("embedded", f"fashion_mnist_{part}.xz").read_bytes()
    content = np.frombuffer(lzma.decompress(packed), np.uint8)
    images, labels = content[count:].reshape(count, 28, 28), content[:count]
    return ArraySource(images, labels, FASHION_MNIST_CLASSES, "the embedded Fashion-MNIST")


def fashion_mnist(folder: Path, training: bool) -> ArraySource:
    """The whole of Fashion-MNIST, from its four files as published."""
    part = "train" if training else "t10k"
    files = [folder / f"{part}-images-idx3-ubyte.gz", folder / f"{part}-labels-idx1-ubyte.gz"]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"no {' and no '.join(missing)}: name the folder with Fashion-MNIST's four .gz files")
    try:
        images, labels = (np.frombuffer(gzip.decompress(file.read_bytes()), np.uint8) for file in files)
        # The files begin with 16 and with 8 bytes that tell their shapes.
        images, labels = images[16:].reshape(-1, 28, 28), labels[8:]
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"{files[0]} or {files[1].name} is damaged ({error}): download them anew") from error
    if len(images) != len(labels):
        raise ValueError(
            f"{files[0]} holds {len(images)} images, but {files[1].name} {len(labels)} labels: get both anew"
        )
    return ArraySource(images, labels, FASHION_MNIST_CLASSES, str(folder))


def open_torchvision(path: str, root: str | None, split: str) -> TorchvisionSource:
    """A torchvision data set that is on disk.

    Args:
        path: torch/NAME, as timm.data calls it.
        root: Its folder.
        split: Its part.
    """
    if root is None:
        raise ValueError(f"{path} needs the folder that it lies in: name it with --data.root")
    try:
        return TorchvisionSource(create_dataset(path, root=root, split=split))
    except AssertionError as error:
        raise ValueError(
            f"timm.data knows no {path}: try torch/cifar10, cifar100, mnist, fashion_mnist, kmnist, qmnist, imagenet, "
            "places365, inaturalist or image_folder"
        ) from error
    except (RuntimeError, OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be opened in {root} ({_first_line(error)}): download it there with torchvision.datasets"
        ) from error


def open_huggingface(name: str, cache: str | None, split: str, option: str) -> HuggingFaceSource:
    """A Hugging Face data set, from a folder or from the hub. No code that comes with it is run.

    Args:
        name: Its folder, or its name on the hub.
        cache: Folder for what is downloaded and converted.
        split: Its part.
        option: The option that names its part.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError("hfds/ needs the package datasets: pip install 'inlinevit[data]'") from error
    try:
        return HuggingFaceSource(datasets.load_dataset(name, split=split, cache_dir=cache), f"hfds/{name}")
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(f"hfds/{name} holds a damaged file ({_first_line(error.__cause__)}): copy it anew") from error
    except (RuntimeError, OSError) as error:
        raise ValueError(f"hfds/{name} cannot be opened ({_first_line(error)}): check --data.path") from error
    except ValueError as error:
        if "split" not in str(error):
            raise
        raise ValueError(f"hfds/{name} has no such part ({_first_line(error)}): choose --data.{option}") from error


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
