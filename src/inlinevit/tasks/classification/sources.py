"""Where labelled images come from: folders, tar files, the embedded set, torchvision, Hugging Face, WebDataset."""

import gzip
import hashlib
import io
import lzma
import os
import pickle
import zlib
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from timm.data import create_dataset
from timm.utils.misc import natural_key

from ...data.images import image_extensions, open_image
from ...data.pixels import AnyImage
from ...engine.results import shorten_list
from ...utils.files import is_inside, open_regular, read_bytes
from ...utils.validation import require
from .config import DIAGNOSTIC_PREFIXES, ClassificationDataConfig
from .dataset_cards import refuse_addresses
from .diagnostics import open_diagnostic
from .shards import ShardSource, find_shards, is_plain_file, list_files
from .splits import EVALUATION_NAMES, SPELLINGS, TRAINING_NAMES, SplitRequest, spellings

FASHION_MNIST_CLASSES = [
    "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
]  # fmt: skip
# Share of each class that is held out for evaluation if data have no splits.
DEFAULT_EVAL_SHARE = 0.2
# A folder with so many files before the first image is not a data set: / and home folders have millions.
MOST_OTHER_FILES = 100_000
# Splits of torchvision's data sets by the spellings that timm maps to them; any other name must be one of theirs.
TORCHVISION_SPLITS = {
    "imagenet": ("train", "val"),
    "places365": ("train-standard", "val"),
    "inaturalist": ("2021_train", "2021_valid"),
    "inat": ("2021_train", "2021_valid"),
}
TORCHVISION_PAIRS = ("cifar10", "cifar100", "mnist", "kmnist", "fashion_mnist", "qmnist")
TORCHVISION_FOLDERS = ("image_folder", "folder")


class ImageSource(Protocol):
    """Labelled images with random access. Reading must work in forked and in spawned processes."""

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes, by label; None if they are not known."""

    def __len__(self) -> int:
        """Number of images."""

    def read(self, index: int) -> tuple[AnyImage, int]:
        """Return an image, not yet decoded, and its label; any error means that the image cannot be used."""

    def name(self, index: int) -> str:
        """Return the name of an image, for messages."""


class ArraySource:
    """Grey images in memory, (images, height, width), with their labels, (images,); the title is for messages."""

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.uint8], classes: list[str], title: str) -> None:
        self.images, self.labels, self.classes, self.title = images, labels, classes, title

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]), int(self.labels[index])

    def name(self, index: int) -> str:
        return f"image {index} of {self.title}"


class FolderSource:
    """A folder of class folders, in timm's order: the name of an image's folder is its class.

    What has the name of an image, but is not a regular file, is one of the images, and cannot be used when it is read.
    """

    def __init__(self, folder: Path) -> None:
        named = sorted(_class_images(folder), key=lambda item: natural_key(item[0]))
        self.files = [file for file, _ in named]
        self.classes, self.labels = _class_labels(folder, self.files, [name for _, name in named])

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> tuple[AnyImage, int]:
        return open_image(self.files[index]), self.labels[index]

    def name(self, index: int) -> str:
        return self.files[index]


def _class_images(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the files in a folder that are named as images are, at any depth, each with the name of its folder."""
    extensions = image_extensions()
    entries_seen, has_images = 0, False
    # Links are followed, but a folder is not entered again from inside of itself.
    pending = [(str(folder), "", frozenset[tuple[int, int]]())]
    while pending:
        place, name, parents = pending.pop()
        status = os.stat(place)
        identity = status.st_dev, status.st_ino
        if identity in parents:
            continue
        with os.scandir(place) as entries:
            for entry in entries:
                is_image = os.path.splitext(entry.name)[1].lower() in extensions
                # An empty folder with the name of an image is not a class.
                if entry.is_dir() and not (is_image and name and not os.listdir(entry.path)):
                    pending.append((entry.path, entry.name, parents | {identity}))
                elif is_image:
                    has_images = True
                    yield entry.path, name
                entries_seen += 1
                if not has_images and entries_seen > MOST_OTHER_FILES:
                    raise ValueError(
                        f"{folder} holds no image among its first {MOST_OTHER_FILES} files: name a folder that holds a "
                        "folder of images for each class"
                    )


class TarSource:
    """A tar file of class folders, not compressed. Images are read from where they are in it; nothing stays open."""

    def __init__(self, file: Path) -> None:
        self.file = file
        extensions = image_extensions()
        members = [item for item in list_files(file) if os.path.splitext(item.name)[1].lower() in extensions]
        members.sort(key=lambda item: natural_key(item.name))
        self.names = [item.name for item in members]
        places = [(item.offset_data, item.size if is_plain_file(item) else -1) for item in members]
        self.offsets = np.array(places, np.int64).reshape(-1, 2)
        folders = [os.path.basename(os.path.dirname(os.path.normpath(name))) for name in self.names]
        self.classes, self.labels = _class_labels(file, self.names, folders)

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> tuple[AnyImage, int]:
        offset, size = self.offsets[index]
        if size < 0:
            raise ValueError("it is a link, a pipe, a device or a sparse file in the tar file, not a regular file")
        with open_regular(self.file) as stream:
            stream.seek(offset)
            content = stream.read(size)
        return open_image(io.BytesIO(content)), self.labels[index]

    def name(self, index: int) -> str:
        return f"{self.names[index]} in {self.file}"


def _class_labels(path: Path, names: list[str], folders: list[str]) -> tuple[list[str], list[int]]:
    """Return the classes in timm's order, and the label of each image; `folders` are their class folders, or ""."""
    if not names:
        raise ValueError(f"{path} holds no images: it should hold a folder of images for each class")
    if "" in folders:
        loose = names[folders.index("")]
        raise ValueError(f"{path} holds images without a class, such as {loose}: put each into the folder of its class")
    classes = sorted(set(folders), key=natural_key)
    labels = {name: label for label, name in enumerate(classes)}
    return classes, [labels[folder] for folder in folders]


class TorchvisionSource:
    """A torchvision data set; its image files are read by `open_image`."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples
        if hasattr(samples, "loader"):
            samples.loader = open_image
        # Some have several names for a class.
        names = [name if isinstance(name, str) else ", ".join(name) for name in getattr(samples, "classes", ())]
        self.classes = names or None

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[AnyImage, int]:
        image, label = self.samples[index]
        return image, int(label)

    def name(self, index: int) -> str:
        return f"image {index} of {type(self.samples).__name__}"


class HuggingFaceSource:
    """A Hugging Face data set with random access: its first column of images, its first column of class labels.

    Args:
        samples: The data set.
        title: Its name, for messages.
        folders: Folders whose files it may name: the paths of images come from the data.
    """

    def __init__(self, samples: Any, title: str, folders: Sequence[str]) -> None:
        import datasets

        self.folders = list(folders)
        kinds = samples.features
        images = [key for key, kind in kinds.items() if isinstance(kind, datasets.Image)]
        labels = [key for key, kind in kinds.items() if isinstance(kind, datasets.ClassLabel)]
        # Without class labels, numbers in a column of this name will do.
        labels += [key for key, kind in kinds.items() if key == "label" and str(kind.dtype).startswith(("int", "uint"))]
        if not images or not labels:
            raise ValueError(
                f"{title} has no column of {'class labels' if images else 'images'} among {', '.join(kinds)}: cast one "
                f"with the data set's {'class_encode_column' if images else 'cast_column'} and save it again"
            )
        self.title, self.image, self.label = title, images[0], labels[0]
        # Undecoded, so that an image that cannot be read does not stop the others.
        self.samples = samples.select_columns([self.image, self.label]).cast_column(
            self.image, datasets.Image(decode=False)
        )
        label = kinds[self.label]
        self.classes = list(label.names) if isinstance(label, datasets.ClassLabel) else None

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[AnyImage, int]:
        row = self.samples[index]
        stored, label = row[self.image], row[self.label]
        if stored is None or (stored["bytes"] is None and stored["path"] is None):
            raise ValueError("it is empty")
        if label is None:
            raise ValueError("it has no label")
        if stored["bytes"] is not None:
            return open_image(io.BytesIO(stored["bytes"])), int(label)
        if not any(is_inside(stored["path"], folder) for folder in self.folders):
            raise ValueError("its path leads out of the data set")
        return open_image(stored["path"]), int(label)

    def name(self, index: int) -> str:
        stored = self.samples[index][self.image]
        path = stored["path"] if stored else None
        return f"image {index} of {self.title}" + (f" ({path})" if path else "")


class SubsetSource:
    """Images of another source, by their indices; `about` says which they are."""

    def __init__(self, source: ImageSource, indices: Sequence[int], about: str = "") -> None:
        self.source, self.indices, self.classes, self.about = source, list(indices), source.classes, about

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> tuple[AnyImage, int]:
        return self.source.read(self.indices[index])

    def name(self, index: int) -> str:
        return self.source.name(self.indices[index])


def hold_out(source: "FolderSource | TarSource", share: float, training: bool) -> SubsetSource:
    """Return the images of a source without those held out for evaluation, or these.

    Of each class with several images, at least one image is on either side. Names of classes and files decide which: a
    copy elsewhere is divided in the same way, and further images leave nearly all of the others where they are.

    Args:
        source: The images.
        share: Share of each class that is held out.
        training: Whether to return the images for training or those for evaluation.
    """
    paths = source.files if isinstance(source, FolderSource) else source.names
    by_class: dict[int, list[int]] = {}
    for index, label in enumerate(source.labels):
        by_class.setdefault(label, []).append(index)
    held_out: set[int] = set()
    for label, indices in by_class.items():
        title = source.classes[label]
        indices.sort(key=lambda index: _digest(f"{title}/{os.path.basename(paths[index])}"))
        held_out.update(indices[: min(max(1, round(share * len(indices))), len(indices) - 1)])
    # A single class is refused for that reason, when training opens it.
    if not held_out and not (training and len(by_class) == 1):
        raise ValueError(
            "no class has two images, so none can be held out for evaluation: add images, or name those for "
            "evaluation with --data.eval_path"
        )
    chosen = [index for index in range(len(source)) if (index in held_out) != training]
    return SubsetSource(source, chosen, f"{share:.3g} of each class, held out of training")


def _digest(name: str) -> bytes:
    """Return an order of names that is random and always the same."""
    return hashlib.blake2b(os.fsencode(name), digest_size=8).digest()


def take_subset(source: ImageSource | ShardSource, count: int) -> ImageSource | ShardSource:
    """Return at most this number of images of a source, evenly spaced: if sorted, each class keeps its proportion."""
    if isinstance(source, ShardSource):
        return source.subset(count)
    count = min(count, len(source))
    return SubsetSource(source, [place * len(source) // count for place in range(count)])


def source_paths(source: ImageSource | ShardSource) -> tuple[list[str], list[Path]]:
    """Return the files with several images, and the folders of class folders, that a source reads from."""
    if isinstance(source, SubsetSource):
        return source_paths(source.source)
    if isinstance(source, ShardSource):
        return [str(shard) for shard in source.shards], []
    if isinstance(source, TarSource):
        return [str(source.file)], []
    if isinstance(source, FolderSource):
        # The folder of an image is its class; a folder beside it would become a class, too.
        parents = {os.path.dirname(os.path.dirname(os.path.abspath(file))) for file in source.files}
        return [], [Path(os.path.commonpath(parents))]
    return [], []


def labels_by_name(
    classes: Sequence[str] | None,
    *known: Sequence[str] | None,
    remedy: str = "remove them, or name other images with --data.eval_path",
) -> list[int] | None:
    """Return the model's label for each class of the images for evaluation; None if names of classes are not known.

    Args:
        classes: Names of the images' classes.
        *known: Names of the model's classes, by label; several lists, where classes have several names.
        remedy: What to do about classes that the model does not know.
    """
    labels = {name: label for names in known for label, name in enumerate(names or ())}
    if classes is None or not labels:
        return None
    unknown = [name for name in classes if name not in labels]
    require(
        not unknown,
        f"the model does not know {len(unknown)} of the {len(classes)} classes of the images "
        f"({shorten_list(unknown)}): {remedy}",
    )
    return [labels[name] for name in classes]


def open_source(config: ClassificationDataConfig, training: bool) -> ImageSource | ShardSource:
    """Open the images for training or for evaluation, with labels and classes just as they are found.

    Raises:
        OSError: There are no such data.
        ValueError: They have no such split, or cannot be read; or the images for training have one class only.
    """
    source = _open_split(config, SplitRequest(config.train_split if training else config.eval_split, training))
    if training and config.eval_share is not None and not isinstance(source, SubsetSource):
        raise ValueError(
            f"data.eval_share is {config.eval_share:g}, but nothing has to be held out of {config.path}, because there "
            "are images for evaluation: leave it out"
        )
    if training and source.classes is not None and len(source.classes) < 2:
        raise ValueError(
            f"{config.path} holds one class ({source.classes[0]}): it should hold a folder of images for each "
            "class, and at least two"
        )
    return source


def _open_split(config: ClassificationDataConfig, request: SplitRequest) -> ImageSource | ShardSource:
    is_eval_path = not request.training and config.eval_path is not None
    path = os.path.expanduser((config.eval_path if is_eval_path else None) or config.path)
    if path == "embedded":
        return embedded_fashion_mnist(request.of_two(path))
    if path.startswith("fashion-mnist:"):
        return fashion_mnist(Path(path.removeprefix("fashion-mnist:")), request.of_two(path))
    if path.startswith(DIAGNOSTIC_PREFIXES):
        return open_diagnostic(path, request)
    kind, _, name = path.partition("/")
    if kind == "torch":
        return open_torchvision(path, config.root, request, is_eval_path)
    if kind == "hfds":
        return open_huggingface(name, config.root, request)
    if kind == "hfids":
        raise ValueError(f"{path} would be streamed, which is not supported: use hfds/{name}")
    if kind == "wds":
        # Only the name itself may look like an address; joined with a folder, it would no longer.
        place = name if config.root is None else str(Path(config.root) / name)
        return find_shards(place, request, request.training or is_eval_path)
    may_hold_out = config.eval_path is None
    folder = find_split(Path(path), request, is_eval_path, may_hold_out)
    source = FolderSource(folder) if folder.is_dir() else TarSource(folder)
    # A run that holds out images has the share in its config; other data are evaluated as a whole.
    if folder == Path(path) and may_hold_out and (request.training or config.eval_share is not None):
        return hold_out(source, config.eval_share or DEFAULT_EVAL_SHARE, request.training)
    return source


def find_split(path: Path, request: SplitRequest, is_eval_path: bool, may_hold_out: bool = False) -> Path:
    """Return the folder or tar file of one split of a data set; the path itself if it is not divided.

    Args:
        path: The data set.
        request: The split.
        is_eval_path: Whether the path was given for evaluation alone.
        may_hold_out: Whether the part for evaluation of a data set that is not divided is held out of it.

    Raises:
        FileNotFoundError: There is nothing at the path.
        ValueError: There is no such split, or the path is the root of the file system.
    """
    option = "--data.eval_path" if is_eval_path else "--data.path"
    if not path.exists():
        raise FileNotFoundError(f"no folder or file at {path}: check {option}")
    if path.resolve() == Path(path.resolve().anchor):
        raise ValueError(f"{path} is the root of the file system: name the folder of the data set with {option}")
    for name in request.candidates():
        if _has_folders(path / name):
            return path / name
        if (path / f"{name}.tar").is_file():
            return path / f"{name}.tar"
    items = sorted(path.iterdir()) if path.is_dir() else []
    splits = [item.name for item in items if _has_folders(item)]
    splits += [item.stem for item in items if item.suffix == ".tar" and item.is_file()]
    is_divided = any(split in TRAINING_NAMES + EVALUATION_NAMES for split in splits)
    if is_divided or (splits and request.name is not None):
        message = request.missing(str(path), splits)
        raise ValueError(message if request.training else f"{message}, or name other images with --data.eval_path")
    request.require_undivided(str(path))
    if request.training or is_eval_path or may_hold_out:
        return path
    raise ValueError(
        f"{path} has no split called val, validation or test: name the images for evaluation with --data.eval_path"
    )


def _has_folders(path: Path) -> bool:
    """Whether a path is a folder that holds folders, as a split does; a folder of images is a class."""
    return path.is_dir() and any(item.is_dir() for item in path.iterdir())


def embedded_fashion_mnist(training: bool) -> ArraySource:
    """Return the Fashion-MNIST images in this package: the first 10,000 for training, or the first 2,000 for test."""
    count, split = (10_000, "train") if training else (2_000, "test")
    packed = resources.files(__package__).joinpath("embedded", f"fashion_mnist_{split}.xz").read_bytes()
    content = np.frombuffer(lzma.decompress(packed), np.uint8)
    images, labels = content[count:].reshape(count, 28, 28), content[:count]
    return ArraySource(images, labels, FASHION_MNIST_CLASSES, "the embedded Fashion-MNIST")


def fashion_mnist(folder: Path, training: bool) -> ArraySource:
    """Return the whole of Fashion-MNIST, from its four files as published."""
    split = "train" if training else "t10k"
    files = [folder / f"{split}-images-idx3-ubyte.gz", folder / f"{split}-labels-idx1-ubyte.gz"]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"no {' and no '.join(missing)}: name the folder with Fashion-MNIST's four .gz files")
    try:
        images, labels = (np.frombuffer(gzip.decompress(read_bytes(file)), np.uint8) for file in files)
        # The files begin with headers of 16 and of 8 bytes.
        images, labels = images[16:].reshape(-1, 28, 28), labels[8:]
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"{files[0]} or {files[1].name} is damaged ({error}): download them again") from error
    if len(images) != len(labels):
        raise ValueError(
            f"{files[0]} holds {len(images)} images, but {files[1].name} {len(labels)} labels: get both again"
        )
    return ArraySource(images, labels, FASHION_MNIST_CLASSES, str(folder))


def open_torchvision(path: str, root: str | None, request: SplitRequest, is_eval_path: bool) -> TorchvisionSource:
    """Open a torchvision data set, torch/NAME, that is in the folder `root`; see find_split."""
    if root is None:
        raise ValueError(f"{path} needs the folder that it is in: name it with --data.root")
    name = path.lower().split("/", 2)[-1]
    if name not in (*TORCHVISION_PAIRS, *TORCHVISION_SPLITS, *TORCHVISION_FOLDERS):
        raise ValueError(
            f"timm.data knows no {path}: try torch/cifar10, cifar100, mnist, fashion_mnist, kmnist, qmnist, imagenet, "
            "places365, inaturalist or image_folder"
        )
    split = ("train" if request.training else "validation") if request.name is None else request.name
    if name in TORCHVISION_PAIRS:
        split = "train" if request.of_two(path) else "test"
    elif name in TORCHVISION_SPLITS:
        train, held_out = TORCHVISION_SPLITS[name]
        split = train if split in SPELLINGS[0] else held_out if split in SPELLINGS[1] else split
    elif name in TORCHVISION_FOLDERS:
        # timm would take the whole folder in place of a split that does not exist.
        root = str(find_split(Path(root), request, is_eval_path))
    try:
        return TorchvisionSource(create_dataset(path, root=root, split=split, search_split=False))
    # A damaged file can make torchvision raise anything.
    except Exception as error:
        if "Valid values are" in str(error):
            raise ValueError(
                f"{path} has no split called {split!r} ({_first_line(error)}): choose with {request.option}"
            ) from error
        reason = _first_line(error) or type(error).__name__
        if isinstance(error, pickle.UnpicklingError):
            reason = "a file of it is damaged, or holds more than numbers"
        raise ValueError(
            f"{path} cannot be opened in {root} ({reason}): download it there with torchvision.datasets"
        ) from error


def open_huggingface(name: str, cache: str | None, request: SplitRequest) -> HuggingFaceSource:
    """Open a Hugging Face data set, from a folder or from the hub. No code that comes with it is run.

    Args:
        name: Its folder, or its name on the hub.
        cache: Folder for what is downloaded and converted.
        request: Its split; if it is not given, train or validation in any spelling.
    """
    try:
        import datasets
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError as error:
        raise ValueError("hfds/ needs the package datasets: pip install 'inlinevit[data]'") from error
    if os.path.isdir(name):
        refuse_addresses(Path(name))
    # A name that was given is taken as it is: it may be any that the library understands, such as train[:10%].
    names = (request.name,) if request.name is not None else spellings("train" if request.training else "validation")
    for split in names:
        try:
            samples = datasets.load_dataset(name, split=split, cache_dir=cache)
        except datasets.exceptions.DatasetGenerationError as error:
            raise ValueError(
                f"hfds/{name} holds a damaged file ({_first_line(error.__cause__)}): copy it again"
            ) from error
        except (RuntimeError, OSError) as error:
            raise ValueError(f"hfds/{name} cannot be opened ({_first_line(error)}): check --data.path") from error
        except ValueError as error:
            if "split" not in str(error).lower():
                raise
            if split == names[-1]:
                raise ValueError(
                    f"hfds/{name} has no split called {names[0]!r} ({_first_line(error)}): choose with {request.option}"
                ) from error
        else:
            homes = datasets.config.HF_CACHE_HOME, datasets.config.HF_DATASETS_CACHE, HF_HUB_CACHE
            folders = [str(folder) for folder in (name, cache, *homes) if folder]
            return HuggingFaceSource(samples, f"hfds/{name}", folders)
    raise AssertionError("the last name either opens or raises")


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
