import gzip
import io
import json
import os
import pickle
import sys
import tarfile
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from inlinevit.tasks.classification import sources
from inlinevit.tasks.classification.config import ClassificationDataConfig
from inlinevit.tasks.classification.shards import ShardSource
from inlinevit.tasks.classification.sources import (
    FASHION_MNIST_CLASSES,
    ArraySource,
    ImageSource,
    labels_by_name,
    open_source,
    source_paths,
    take_subset,
)


def encoded(colour: int, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (colour, 0, 0)).save(stream, kind)
    return stream.getvalue()


def make_classes(folder: Path, images: dict[str, list[str]]) -> Path:
    """Class folders with images, whose red tells their place in the row of all."""
    colour = 0
    for name, files in images.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file in files:
            (folder / name / file).write_bytes(encoded(colour))
            colour += 1
    return folder


def make_tar(file: Path, folder: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as archive:
        archive.add(folder, ".")
    return file


def contents(source: ImageSource | ShardSource) -> list[tuple[int, int]]:
    """The red and the label of each image."""
    assert not isinstance(source, ShardSource)
    read = (source.read(index) for index in range(len(source)))
    return [(image.convert("RGB").getpixel((0, 0))[0], label) for image, label in read]


THREE = {"bird": ["1.png", "2.png"], "cat10": ["1.png"], "cat9": ["10.jpg", "9.jpg", "x.WEBP"]}
# In natural order: cat9 comes before cat10.
THREE_CONTENTS = [(0, 0), (1, 0), (2, 2), (4, 1), (3, 1), (5, 1)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_classes(tmp_path / "three classes", THREE)


def train(path: Path | str, **options: Any) -> ImageSource | ShardSource:
    """Open images for training; nothing is held out, because those for evaluation are elsewhere."""
    return open_source(ClassificationDataConfig(path=str(path), **{"eval_path": "elsewhere", **options}), training=True)


def evaluation(path: Path | str, **options: Any) -> ImageSource | ShardSource:
    return open_source(ClassificationDataConfig(path=str(path), **options), training=False)


def evaluated(path: Path | str, **options: Any) -> list[tuple[int, int]]:
    """The red of each image for evaluation, and its label in training."""
    source = evaluation(path, **options)
    labels = labels_by_name(source.classes, train(path, **options).classes)
    assert labels is not None
    return sorted((red, labels[label]) for red, label in contents(source))


def test_folder(folder: Path) -> None:
    (folder / "bird" / "notes.txt").write_text("no image")
    source = train(folder)
    assert source.classes == ["bird", "cat9", "cat10"]
    assert sorted(contents(source)) == sorted(THREE_CONTENTS)
    assert source.name(0) == str(folder / "bird" / "1.png")


def test_tar_is_the_same_as_its_folder(folder: Path, tmp_path: Path) -> None:
    source = train(make_tar(tmp_path / "images.tar", folder))
    assert source.classes == train(folder).classes
    assert contents(source) == contents(train(folder))
    assert source.name(0) == f"./bird/1.png in {tmp_path / 'images.tar'}"
    # Spawned workers get a pickled source.
    assert contents(pickle.loads(pickle.dumps(source))) == contents(source)


@pytest.mark.parametrize("names", [("train", "val"), ("train", "validation"), ("training", "test")])
@pytest.mark.parametrize("packed", [False, True])
def test_parts(tmp_path: Path, names: tuple[str, str], packed: bool) -> None:
    data = tmp_path / "data"
    place = tmp_path / "unpacked" if packed else data
    make_classes(place / names[0], THREE)
    make_classes(place / names[1], {"cat9": ["1.png"], "cat10": ["1.png"]})
    if packed:
        for name in names:
            make_tar(data / f"{name}.tar", place / name)
    assert len(train(data)) == 6
    assert evaluation(data).classes == ["cat9", "cat10"]
    # Labels are those of training, though the evaluation images lack a class.
    assert evaluated(data) == [(0, 1), (1, 2)]


def test_a_class_may_be_called_as_a_part_is(tmp_path: Path) -> None:
    make_classes(tmp_path, {"train": ["1.png"], "car": ["1.png"], "test": ["1.png"]})
    assert train(tmp_path).classes == ["car", "test", "train"]


def test_evaluation_data_of_another_kind(folder: Path, tmp_path: Path) -> None:
    other = make_classes(tmp_path / "other", {"cat10": ["1.png"], "bird": ["1.png"]})
    assert evaluated(folder, eval_path=str(make_tar(tmp_path / "other.tar", other))) == [(0, 2), (1, 0)]
    boots = make_classes(tmp_path / "boots", {"ankle boot": ["1.png"], "bag": ["1.png"]})
    assert evaluated("embedded", eval_path=str(boots)) == [(0, 9), (1, 8)]
    # The images for training are not needed.
    source = evaluation("nowhere", eval_path=str(boots))
    assert source.classes == ["ankle boot", "bag"]
    assert labels_by_name(source.classes, ["bag", "hat", "ankle boot"]) == [2, 0]
    assert labels_by_name(source.classes, None) is None


def test_embedded_set() -> None:
    started = time.process_time()
    source = train("embedded")
    assert time.process_time() - started < 1
    assert isinstance(source, ArraySource)
    assert len(source) == 10_000
    assert source.classes == FASHION_MNIST_CLASSES
    assert np.bincount(source.labels, minlength=10).min() > 900
    assert source.read(0)[0].size == (28, 28)
    assert len(evaluation("embedded")) == 2_000


def make_fashion_mnist(folder: Path, part: str, count: int) -> None:
    images, labels = np.arange(count * 784) % 251, np.arange(count) % 10
    for name, head, content in (("images-idx3", 16, images), ("labels-idx1", 8, labels)):
        packed = gzip.compress(bytes(head) + content.astype(np.uint8).tobytes())
        (folder / f"{part}-{name}-ubyte.gz").write_bytes(packed)


def test_whole_fashion_mnist(tmp_path: Path) -> None:
    make_fashion_mnist(tmp_path, "train", 12)
    make_fashion_mnist(tmp_path, "t10k", 5)
    source = train(f"fashion-mnist:{tmp_path}")
    assert [source.read(index)[1] for index in range(12)] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert np.asarray(source.read(1)[0])[0, :3].tolist() == [784 % 251, 785 % 251, 786 % 251]
    assert len(evaluation(f"fashion-mnist:{tmp_path}")) == 5


def test_torchvision(tmp_path: Path, folder: Path) -> None:
    source = train("torch/image_folder", root=str(folder))
    assert source.classes == ["bird", "cat10", "cat9"]
    assert len(source) == 6


@pytest.fixture
def huggingface(tmp_path: Path) -> Path:
    data = tmp_path / "hub"
    make_classes(data / "train", THREE)
    make_classes(data / "test", {"bird": ["1.png"], "cat10": ["1.png"], "cat9": ["3.png"]})
    return data


def test_huggingface(huggingface: Path, tmp_path: Path) -> None:
    options = {"root": str(tmp_path / "cache"), "eval_split": "test"}
    source = train(f"hfds/{huggingface}", **options)
    assert source.classes == ["bird", "cat10", "cat9"]
    assert sorted(contents(source)) == [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 2)]
    assert "bird" in source.name(0)
    assert contents(evaluation(f"hfds/{huggingface}", **options)) == [(0, 0), (1, 1), (2, 2)]
    # Its classes have another order than those of a folder, and go by their names.
    assert evaluated(huggingface, eval_path=f"hfds/{huggingface}", **options) == [(0, 0), (1, 2), (2, 1)]


def test_huggingface_with_other_columns(tmp_path: Path) -> None:
    import datasets

    columns = {"img": datasets.Image(), "label": datasets.Value("int64"), "text": datasets.Value("string")}
    rows = {"img": [{"bytes": encoded(n), "path": None} for n in range(3)], "label": [5, 6, None], "text": ["a"] * 3}
    datasets.Dataset.from_dict(rows, datasets.Features(columns)).to_parquet(tmp_path / "data" / "train.parquet")
    source = train(f"hfds/{tmp_path / 'data'}", root=str(tmp_path / "cache"))
    assert source.classes is None
    assert [source.read(n)[1] for n in range(2)] == [5, 6]
    with pytest.raises(ValueError, match="it has no label"):
        source.read(2)
    assert source.name(1) == f"image 1 of hfds/{tmp_path / 'data'}"


def test_subsets_are_evenly_spaced() -> None:
    labels = np.repeat(np.arange(10, dtype=np.uint8), 100)
    source = ArraySource(np.zeros((1000, 4, 4), np.uint8), labels, FASHION_MNIST_CLASSES, "test")
    subset = cast(ImageSource, take_subset(source, 50))
    assert [subset.read(index)[1] for index in range(50)] == np.repeat(np.arange(10), 5).tolist()
    assert subset.name(1) == "image 20 of test"
    assert len(take_subset(source, 5000)) == 1000


def refusal(path: Path | str, training: bool = True, **options: Any) -> str:
    with pytest.raises((ValueError, OSError)) as caught:
        open_source(ClassificationDataConfig(path=str(path), **options), training=training)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_refusals_of_folders(tmp_path: Path, folder: Path) -> None:
    assert "no folder or file" in refusal(tmp_path / "missing")
    assert "--data.path" in refusal(tmp_path / "missing")
    assert "--data.eval_path" in refusal(folder, training=False, eval_path="missing")
    (tmp_path / "empty").mkdir()
    assert "holds no images" in refusal(tmp_path / "empty")
    assert "holds one class (dog)" in refusal(make_classes(tmp_path / "one", {"dog": ["1.png"]}))
    assert "without a class, such as" in refusal(make_classes(tmp_path / "flat", {"": ["1.png", "2.png"]}))
    single = make_classes(tmp_path / "single", {"bird": ["1.png"], "cat": ["1.png"]})
    assert "no class has two images" in refusal(single, training=False, eval_share=0.2)
    assert "nothing has to be held out of embedded" in refusal("embedded", eval_share=0.5)
    only_val = make_classes(tmp_path / "only" / "val", THREE).parent
    assert "no split called train: choose with --data.train_split among val" in refusal(only_val)
    alien = make_classes(tmp_path / "alien", {"bird": ["1.png"], "dodo": ["1.png"]})
    with pytest.raises(ValueError, match=r"not know 1 of the 2 classes of the images \(dodo\): .* --data.eval_path$"):
        evaluated(folder, eval_path=str(alien))


def test_the_whole_disk_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("/", tmp_path / "root"):
        if path != "/":
            path.symlink_to("/")
        assert "is the root of the file system: name the folder of the data set with --data.path" in refusal(path)
    monkeypatch.setattr(sources, "MOST_OTHER_FILES", 5)
    folder = make_classes(tmp_path / "files", {"a": ["1.png", "2.png"], "b": ["1.png"]})
    for number in range(4):
        (folder / "a" / f"{number}.txt").touch()
    assert len(train(folder)) == 3, "files beside images are left out"
    for number in range(6):
        (tmp_path / "texts" / f"{number}").mkdir(parents=True)
    assert "texts holds no image among its first 5 files: name a folder" in refusal(tmp_path / "texts")


def test_refusals_of_tar_files(tmp_path: Path, folder: Path) -> None:
    whole = make_tar(tmp_path / "whole.tar", folder)
    truncated = tmp_path / "truncated.tar"
    truncated.write_bytes(whole.read_bytes()[:-9000])
    assert "damaged or no plain tar file" in refusal(truncated)
    text = tmp_path / "text.tar"
    text.write_text("This is no tar file. " * 100)
    assert "damaged or no plain tar file" in refusal(text)
    packed = tmp_path / "packed.tar.gz"
    packed.write_bytes(gzip.compress(whole.read_bytes()))
    assert "without compression" in refusal(packed)
    assert "holds no images" in refusal(make_tar(tmp_path / "none.tar", make_classes(tmp_path / "none", {"a": []})))
    flat = make_classes(tmp_path / "flat", {"": ["1.png"], "dog": ["1.png"]})
    assert "without a class, such as ./1.png" in refusal(make_tar(tmp_path / "flat.tar", flat))


def test_refusals_of_fashion_mnist(tmp_path: Path) -> None:
    assert "four .gz files" in refusal(f"fashion-mnist:{tmp_path}")
    make_fashion_mnist(tmp_path, "train", 12)
    images = tmp_path / "train-images-idx3-ubyte.gz"
    whole = images.read_bytes()
    images.write_bytes(whole[:-20])
    assert "damaged" in refusal(f"fashion-mnist:{tmp_path}")
    make_fashion_mnist(tmp_path, "t10k", 5)
    images.write_bytes((tmp_path / "t10k-images-idx3-ubyte.gz").read_bytes())
    assert "5 images, but" in refusal(f"fashion-mnist:{tmp_path}")


def test_refusals_of_torchvision(tmp_path: Path) -> None:
    assert "--data.root" in refusal("torch/cifar10")
    assert "try torch/cifar10" in refusal("torch/cifar11", root=str(tmp_path))
    assert "download it there" in refusal("torch/cifar10", root=str(tmp_path))


def test_refusals_of_huggingface(huggingface: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = str(tmp_path / "cache")
    # The default name of the evaluation part is not there.
    assert "--data.eval_split" in refusal(f"hfds/{huggingface}", False, root=cache)
    assert "cannot be opened" in refusal(f"hfds/{tmp_path / 'missing'}", root=cache)
    assert "use hfds/" in refusal(f"hfids/{huggingface}", root=cache)
    (tmp_path / "strings").mkdir()
    (tmp_path / "strings" / "train.csv").write_text("label,size\ncat,1\ndog,2\n")
    assert "no column of images among label, size" in refusal(f"hfds/{tmp_path / 'strings'}", root=cache)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'inlinevit[data]'" in refusal(f"hfds/{huggingface}", root=cache)


@pytest.mark.parametrize("path", ["hfds/", "hfds", "hfids/", "wds/", "wds", "torch/"])
def test_prefixes_without_a_name_are_refused(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = refusal(path, root=str(tmp_path) if path == "torch/" else None)
    assert message == f"data.path is {path}, which names no data set: write {path.strip('/')}/NAME"


def test_labels_in_words_are_refused(tmp_path: Path) -> None:
    import datasets

    columns = {"image": datasets.Image(), "label": datasets.Value("string")}
    rows = {"image": [{"bytes": encoded(0), "path": None}], "label": ["cat"]}
    datasets.Dataset.from_dict(rows, datasets.Features(columns)).to_parquet(tmp_path / "data" / "train.parquet")
    message = refusal(f"hfds/{tmp_path / 'data'}", root=str(tmp_path / "cache"))
    assert "no column of class labels" in message
    assert "class_encode_column" in message


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n%%EOF\n"


def problem(source: ImageSource | ShardSource, name: str) -> str:
    """What is wrong with the image of a name."""
    assert not isinstance(source, ShardSource)
    (index,) = (index for index in range(len(source)) if name in source.name(index))
    with pytest.raises((OSError, ValueError)) as caught:
        source.read(index)[0].load()
    return str(caught.value)


def test_eps_is_refused_wherever_images_come_from(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import EpsImagePlugin

    started: list[Any] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *arguments: started.append(arguments))
    hub = tmp_path / "hub"
    folder = make_classes(hub / "train", THREE)
    (folder / "bird" / "evil.jpg").write_bytes(EPS)
    packed = make_tar(tmp_path / "images.tar", folder)
    for source in (
        train(folder),
        train(packed),
        train(f"hfds/{hub}", root=str(tmp_path / "cache")),
    ):
        assert "its format is EPS, which is not supported" in problem(source, "evil.jpg")
    # torchvision's data sets do not tell the names of files.
    source = train("torch/image_folder", root=str(folder))
    assert not isinstance(source, ShardSource)
    problems = 0
    for index in range(len(source)):
        try:
            source.read(index)[0].load()
        except ValueError as error:
            problems += "its format is EPS" in str(error)
    assert problems == 1
    assert not started


@pytest.mark.timeout(60)
@pytest.mark.parametrize("linked", [False, True])
def test_what_is_not_a_regular_file_cannot_be_used(folder: Path, tmp_path: Path, linked: bool) -> None:
    """A pipe was waited for without end."""
    place = tmp_path if linked else folder / "bird"
    os.mkfifo(place / "pipe.jpg")
    (place / "folder.jpg").mkdir()
    (folder / "bird" / "zero.jpg").symlink_to("/dev/zero")
    (folder / "bird" / "gone.jpg").symlink_to("nowhere")
    if linked:
        for name in ("pipe.jpg", "folder.jpg"):
            (folder / "bird" / name).symlink_to(tmp_path / name)
    source = train(folder)
    assert source.classes == ["bird", "cat9", "cat10"]
    assert len(source) == 6 + 4, "none is left out without a word"
    assert "is a named pipe, not a regular file" in problem(source, "pipe.jpg")
    assert "is a folder, not a regular file" in problem(source, "folder.jpg")
    assert "is a character device, not a regular file" in problem(source, "zero.jpg")
    assert "No such file" in problem(source, "gone.jpg")
    source = train(make_tar(tmp_path / "images.tar", folder))
    assert len(source) == 6 + 3 + linked
    for name in ("zero.jpg", "gone.jpg", "pipe.jpg"):
        assert "not a regular file" in problem(source, name)


@pytest.mark.timeout(60)
def test_pipes_in_place_of_whole_data_sets_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "images.tar")
    assert "images.tar is a named pipe, not a regular file" in refusal(tmp_path / "images.tar")
    make_fashion_mnist(tmp_path, "train", 12)
    (tmp_path / "train-images-idx3-ubyte.gz").unlink()
    os.mkfifo(tmp_path / "train-images-idx3-ubyte.gz")
    assert "no " in refusal(f"fashion-mnist:{tmp_path}")


@pytest.mark.timeout(60)
def test_links_in_a_circle_are_followed_once(folder: Path) -> None:
    """Two links to the folder around them would make 2^40 paths."""
    for name in ("bird", "cat9"):
        (folder / name / "up").symlink_to(folder)
        (folder / name / "self").symlink_to(".")
    source = train(folder)
    assert source.classes == ["bird", "cat9", "cat10"]
    assert {os.path.realpath(source.name(index)) for index in range(len(source))} == {
        str(folder / name / file) for name, files in THREE.items() for file in files
    }


def test_other_endings_of_images(folder: Path, tmp_path: Path) -> None:
    """They are those of the formats that are read, in folders and in tar files."""
    for name in ("a.JFIF", "b.tga", "c.qoi", "d.eps", "e.txt", "f.jpg.bak"):
        (folder / "bird" / name).write_bytes(encoded(9))
    for path in (folder, make_tar(tmp_path / "images.tar", folder)):
        source = train(path)
        names = {Path(source.name(index).split(" in ")[0]).name for index in range(len(source))}
        assert {"a.JFIF", "b.tga", "c.qoi"} <= names
        assert not {"d.eps", "e.txt", "f.jpg.bak"} & names


@pytest.fixture(params=[False, True], ids=["folders", "tar files"])
def divided(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Data with train and test of three classes, and holdout of two."""
    home = tmp_path / "divided"
    parts = {"train": THREE, "test": THREE, "holdout": {"bird": ["1.png"], "cat9": ["1.png"]}}
    for name, images in parts.items():
        make_classes((tmp_path / "unpacked" if request.param else home) / name, images)
        if request.param:
            make_tar(home / f"{name}.tar", tmp_path / "unpacked" / name)
    return home


def test_a_split_that_was_named_is_taken(divided: Path) -> None:
    assert len(evaluation(divided)) == 6
    assert len(evaluation(divided, eval_split="test")) == 6
    assert len(evaluation(divided, eval_split="testing")) == 6
    assert len(evaluation(divided, eval_split="holdout")) == 2
    assert len(evaluation(divided, eval_split="train")) == 6
    assert len(train(divided, train_split="holdout")) == 2
    assert len(evaluation(divided, eval_path=str(divided), eval_split="holdout")) == 2


@pytest.mark.parametrize("split", ["val", "validation", "other", "../divided/test", ".", "..", "test/bird"])
def test_a_split_that_does_not_exist_is_refused(divided: Path, split: str) -> None:
    for options in ({}, {"eval_path": str(divided)}):
        message = refusal(divided, training=False, eval_split=split, **options)
        assert f"has no split called {split!r}: choose with --data.eval_split among holdout, test, train" in message
    message = refusal(divided, train_split=split)
    assert f"has no split called {split!r}: choose with --data.train_split among holdout, test, train" in message


def test_training_images_are_not_evaluated_on(tmp_path: Path) -> None:
    only = make_classes(tmp_path / "only" / "train", THREE).parent
    for options in ({}, {"eval_path": str(only)}):
        message = refusal(only, training=False, **options)
        assert "has no split called val: choose with --data.eval_split among train" in message
    assert len(evaluation(only, eval_split="train")) == 6, "unless that is what was said"
    # The other way round, too.
    assert len(evaluation("nowhere", eval_path=str(make_classes(tmp_path / "v" / "val", THREE).parent))) == 6
    assert "no split called train" in refusal(tmp_path / "v")


def test_data_that_are_not_divided_have_no_splits(folder: Path, tmp_path: Path) -> None:
    packed = make_tar(tmp_path / "images.tar", folder)
    for path in (folder, packed):
        assert "is not divided, so it has no split called 'test'" in refusal(
            path, False, eval_path=str(path), eval_split="test"
        )
        assert "is not divided, so it has no split called 'other'" in refusal(path, train_split="other")
        assert "is not divided, so it has no split called 'train'" in refusal(path, train_split="train")


@pytest.mark.parametrize("packed", [False, True])
def test_a_share_of_data_that_are_not_divided_is_held_out(packed: bool, tmp_path: Path) -> None:
    kinds = {"a": [f"{i}.png" for i in range(20)], "b": [f"{i}.png" for i in range(5)], "c": ["0.png"]}
    place = make_classes(tmp_path / "photos", kinds)
    path = make_tar(tmp_path / "photos.tar", place) if packed else place

    def parts(place: Path, **options: Any) -> list[list[str]]:
        config = ClassificationDataConfig(path=str(place), **options)
        sources = [open_source(config, training=training) for training in (True, False)]
        assert sources[0].classes == sources[1].classes == ["a", "b", "c"]
        assert source_paths(sources[0]) == source_paths(sources[1])
        names = [[cast(ImageSource, source).name(index) for index in range(len(source))] for source in sources]
        return [["/".join(Path(name.partition(" in ")[0]).parts[-2:]) for name in part] for part in names]

    assert len(open_source(ClassificationDataConfig(path=str(path)), training=False)) == 26
    training, held_out = parts(path, eval_share=0.2)
    assert len(open_source(ClassificationDataConfig(path=str(path)), training=True)) == len(training)
    assert [sum(name.startswith(kind) for name in held_out) for kind in "abc"] == [4, 1, 0]
    assert sorted(training + held_out) == sorted(f"{kind}/{name}" for kind, names in kinds.items() for name in names)
    assert len(parts(path, eval_share=0.5)[1]) == 10 + 2
    # One image of each class stays for training.
    assert len(parts(path, eval_share=0.99)[0]) == 3
    # A copy is divided in the same way, and so is one with further images, but for few.
    copy = make_classes(tmp_path / "copy", {**kinds, "a": [f"{i}.png" for i in range(25)]})
    assert len(set(held_out) - set(parts(copy, eval_share=0.2)[1])) <= 1
    # Images that are given for evaluation are all used, and nothing is held out of those for training.
    assert [len(part) for part in parts(path, eval_path=str(path))] == [26, 26]


def test_splits_of_data_with_two_parts(tmp_path: Path) -> None:
    for split, count in {"train": 10_000, "training": 10_000, "test": 2_000, "val": 2_000, "validation": 2_000}.items():
        assert len(evaluation("embedded", eval_split=split)) == count
    assert "embedded has no split called 'other': choose with --data.eval_split among train, test" in refusal(
        "embedded", training=False, eval_split="other"
    )
    assert "no split called 'other': choose with --data.train_split" in refusal(
        f"fashion-mnist:{tmp_path}", train_split="other"
    )
    assert "no split called 'other': choose with --data.eval_split" in refusal(
        "torch/cifar10", False, root=str(tmp_path), eval_split="other"
    )


def test_splits_of_torchvision(tmp_path: Path) -> None:
    """timm takes the whole folder in place of a split that does not exist."""
    make_classes(tmp_path / "train", THREE)
    assert len(train("torch/image_folder", root=str(tmp_path))) == 6
    options = {"root": str(tmp_path)}
    assert "no split called val: choose" in refusal("torch/image_folder", False, **options)
    assert "no split called 'other': choose" in refusal("torch/image_folder", train_split="other", **options)
    make_classes(tmp_path / "val", {"bird": ["1.png"], "cat9": ["1.png"], "cat10": ["1.png"]})
    assert len(evaluation("torch/image_folder", **options)) == 3
    message = refusal("torch/imagenet", False, eval_split="test", **options)
    assert "no split called 'test'" in message
    assert "--data.eval_split" in message


def test_splits_of_huggingface(huggingface: Path, tmp_path: Path) -> None:
    options = {"root": str(tmp_path / "cache")}
    for split in ("validation", "val", "other"):
        message = refusal(f"hfds/{huggingface}", False, eval_split=split, **options)
        assert f"has no split called {split!r}" in message
        assert "test" in message
    assert "data.eval_split is empty" in refusal(f"hfds/{huggingface}", False, eval_split="", **options)
    assert len(evaluation(f"hfds/{huggingface}", eval_split="test", **options)) == 3
    assert len(evaluation(f"hfds/{huggingface}", eval_split="train[:2]", **options)) == 2


def test_paths_out_of_a_huggingface_data_set_are_not_opened(tmp_path: Path) -> None:
    import datasets

    (tmp_path / "outside.png").write_bytes(encoded(1))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "inside.png").write_bytes(encoded(2))
    paths = [str(tmp_path / "outside.png"), str(tmp_path / "data" / ".." / "outside.png"), "/dev/zero",
             "http://127.0.0.1:9/x.png", "pipe:ls", str(tmp_path / "data" / "inside.png")]  # fmt: skip
    columns = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = {"image": [{"bytes": None, "path": path} for path in paths], "label": [0] * len(paths)}
    table = datasets.Dataset.from_dict(rows, columns).data.table
    import pyarrow.parquet

    pyarrow.parquet.write_table(table, tmp_path / "data" / "train.parquet")
    # The images beside it are not the data.
    card = {"configs": [{"config_name": "default", "data_files": "train.parquet"}]}
    (tmp_path / "data" / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n")
    source = train(f"hfds/{tmp_path / 'data'}", root=str(tmp_path / "cache"))
    assert not isinstance(source, ShardSource)
    for index in range(len(paths) - 1):
        with pytest.raises(ValueError, match="its path leads out of the data set"):
            source.read(index)
    assert source.read(len(paths) - 1)[0].convert("RGB").getpixel((0, 0)) == (2, 0, 0)


@pytest.mark.parametrize(
    "place",
    ["reference://x.csv::{home}/refs.json", "http://127.0.0.1:9/x.csv", "zip://x.csv::a.zip", "{home}/x.csv",
     "../x.csv", "~/x.csv", "hf://datasets/a/b/x.csv", "file://{home}/x.csv"],
)  # fmt: skip
@pytest.mark.parametrize("layout", ["text", "list", "split", "standalone"])
def test_addresses_in_the_metadata_of_a_folder_are_not_followed(tmp_path: Path, place: str, layout: str) -> None:
    """fsspec would fetch or interpret them: with reference://, it renders templates of the data."""
    home = make_classes(tmp_path / "data" / "train", THREE).parent
    (home / "refs.json").write_text('{"version": 1, "templates": {"u": "{{ 1 }}"}, "refs": {"x.csv": "a"}}')
    place = place.format(home=home)
    files: Any = {"text": place, "list": ["ok.csv", place]}.get(layout, [{"split": "train", "path": [place]}])
    card = json.dumps({"configs": [{"config_name": "default", "data_files": files}]})
    if layout == "standalone":
        (home / ".huggingface.yaml").write_text(card)
    else:
        (home / "README.md").write_text(f"---\n{card}\n---\nA data set.\n")
    message = refusal(f"hfds/{home}", root=str(tmp_path / "cache"))
    # Long names are cut.
    assert f"names the data file {repr(place)[:40]}" in message
    assert "which is not a plain path in the folder" in message


def test_metadata_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    home = make_classes(tmp_path / "data" / "train", THREE).parent
    (home / "README.md").write_text("---\nconfigs: [\n---\n")
    assert "not valid YAML" in refusal(f"hfds/{home}", root=str(tmp_path / "cache"))
    (home / "README.md").write_text("# A data set: https://example.org\n\n---\nconfigs: [http://x]\n---\n")
    assert len(train(f"hfds/{home}", root=str(tmp_path / "cache"))) == 6, "text is no metadata"


def test_loading_scripts_are_not_run(tmp_path: Path) -> None:
    home = make_classes(tmp_path / "evil" / "train", THREE).parent
    (home / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')")
    assert "scripts are no longer supported" in refusal(f"hfds/{home}", root=str(tmp_path / "cache"))
    assert not (tmp_path / "owned").exists()


def test_pickles_of_torchvision_are_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return open, (str(tmp_path / "owned"), "w")

    batches = tmp_path / "cifar-10-batches-py"
    batches.mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"):
        (batches / name).write_bytes(pickle.dumps(Evil()))
    assert "cannot be opened" in refusal("torch/cifar10", root=str(tmp_path))
    for name in ("MNIST", "FashionMNIST", "KMNIST"):
        processed = tmp_path / name / "processed"
        processed.mkdir(parents=True)
        for file in ("training.pt", "test.pt"):
            (processed / file).write_bytes(pickle.dumps(Evil()))
    for name in ("mnist", "fashion_mnist", "kmnist"):
        message = refusal(f"torch/{name}", root=str(tmp_path))
        assert f"torch/{name} cannot be opened" in message
        assert "weights_only" not in message
    assert not (tmp_path / "owned").exists()
