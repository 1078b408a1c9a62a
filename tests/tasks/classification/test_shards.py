import io
import json
import os
import re
import struct
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from inlinevit.tasks.classification.config import ClassificationDataConfig
from inlinevit.tasks.classification.shards import ShardImages, ShardSource
from inlinevit.tasks.classification.sources import open_source


def make_shard(file: Path, samples: list[tuple[str, bytes]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as archive:
        for name, content in samples:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file


def image(kind: str = "JPEG") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 0, 0)).save(stream, kind)
    return stream.getvalue()


def samples(labels: list[int], ending: str = "jpg") -> list[tuple[str, bytes]]:
    kind = {"jpg": "JPEG", "webp": "WEBP", "JPEG": "JPEG"}.get(ending, "PNG")
    files = [
        [(f"a/{n:03d}.{ending}", image(kind)), (f"a/{n:03d}.cls", str(label).encode())]
        for n, label in enumerate(labels)
    ]
    return [file for pair in files for file in pair]


def shards(path: Path | str, training: bool = True, **options: Any) -> ShardSource:
    source = open_source(ClassificationDataConfig(path=f"wds/{path}", **options), training=training)
    assert isinstance(source, ShardSource)
    assert source.classes is None
    return source


def labels(source: ShardSource) -> list[list[int]]:
    stored = [list(source.read(shard)) for shard in range(len(source.shards))]
    return [[ShardImages(part).read(index)[1] for index in range(len(part))] for part in stored]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "with space"
    make_shard(folder / "train-0.tar", samples([1, 2, 3]))
    make_shard(folder / "train-1.tar", [("readme.txt", b"no sample"), *samples([4, 5], "JPEG")])
    make_shard(folder / "val-0.tar", samples([6], "webp"))
    return folder


def test_parts_by_the_names_of_shards(folder: Path) -> None:
    source = shards(folder)
    assert labels(source) == [[1, 2, 3], [4, 5]]
    assert source.lengths == [3, 2]
    assert len(source) == 5
    assert labels(shards(folder, training=False)) == [[6]]
    # The folder may be given as a root.
    assert labels(shards(folder.name, root=str(folder.parent))) == [[1, 2, 3], [4, 5]]
    assert ShardImages(list(source.read(1))).name(0) == f"a/000 in {folder / 'train-1.tar'}"


def test_parts_by_folders(tmp_path: Path) -> None:
    make_shard(tmp_path / "train" / "b.tar", samples([1, 2]))
    make_shard(tmp_path / "train" / "a.tar", samples([3], "png"))
    make_shard(tmp_path / "test" / "a.tar", samples([4]))
    assert labels(shards(tmp_path)) == [[3], [1, 2]]
    assert labels(shards(tmp_path, training=False)) == [[4]]


def test_patterns(folder: Path) -> None:
    assert labels(shards(folder / "train-{0..1}.tar")) == [[1, 2, 3], [4, 5]]
    assert labels(shards(folder, train_split="train-{1..1}.tar")) == [[4, 5]]
    assert labels(shards(folder, False, eval_path=f"wds/{folder}/val-0.tar")) == [[6]]


def test_lengths_may_be_given(folder: Path) -> None:
    info = {"splits": {"small": {"filenames": ["train-1.tar", "train-0.tar"], "shard_lengths": [2, 3]}}}
    (folder / "_info.json").write_text(json.dumps(info))
    assert labels(shards(folder, train_split="small")) == [[4, 5], [1, 2, 3]]
    info["splits"]["small"]["shard_lengths"] = [2, 4]
    (folder / "_info.json").write_text(json.dumps(info))
    with pytest.raises(
        ValueError, match=r"train-0.tar holds 3 images instead of 4: copy it again, or correct _info.json"
    ):
        labels(shards(folder, train_split="small"))
    (folder / "_info.json").write_text('{"splits": {"small": {}}}')
    with pytest.raises(ValueError, match="correct or remove it"):
        shards(folder, train_split="small")


def test_subsets_take_the_first_images_of_each_shard(folder: Path) -> None:
    source = shards(folder)
    assert source.subset(3).lengths == [1, 1]
    assert source.subset(100).lengths == [3, 2]


def test_what_is_wrong_with_a_sample() -> None:
    stored = [
        {"__key__": "a", "__url__": "x.tar", "jpg": image()},
        {"__key__": "b", "__url__": "x.tar", "jpg": image(), "cls": b"cat"},
        {"__key__": "c", "__url__": "x.tar", "jpg": image(), "cls": b" 7\n"},
    ]
    images = ShardImages(stored)
    with pytest.raises(ValueError, match=r"no \.cls beside it"):
        images.read(0)
    with pytest.raises(ValueError, match="'cat', which is not a whole number"):
        images.read(1)
    assert images.read(2)[1] == 7


def test_refusals(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="no folder at"):
        shards(tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match=r"no shard at .*train-2\.tar"):
        shards(folder / "train-{0..2}.tar")
    with pytest.raises(ValueError, match="eval_path"):
        shards(folder / "train-{0..1}.tar", training=False)
    (folder / "val-0.tar").unlink()
    with pytest.raises(ValueError, match=r"no split called val: choose with --data\.eval_split among train"):
        shards(folder, training=False)
    whole = (folder / "train-0.tar").read_bytes()
    (folder / "train-0.tar").write_bytes(whole[: 512 + 1024 + 300])
    with pytest.raises(ValueError, match=r"train-0\.tar is damaged or no plain tar file"):
        shards(folder)
    # Also where lengths are given, and the damage shows only when it is read.
    source = ShardSource([str(folder / "train-0.tar")], [3])
    for size in range(700, 4000, 300):
        (folder / "train-0.tar").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"train-0\.tar (is damaged|holds . images instead of 3)"):
            list(source.read(0))
    monkeypatch.setitem(sys.modules, "webdataset", None)
    monkeypatch.setitem(sys.modules, "webdataset.shardlists", None)
    with pytest.raises(ValueError, match=r"pip install 'inlinevit\[data\]'"):
        shards(folder)


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shards that somebody else has made, opened as the current folder."""
    home = tmp_path / "hostile"
    make_shard(home / "train-0.tar", samples([1, 2, 3]))
    make_shard(tmp_path / "outside.tar", samples([7]))
    monkeypatch.chdir(home)
    return home


def write_info(folder: Path, name: Any, length: Any = 1) -> None:
    info = {"splits": {"train": {"filenames": [name], "shard_lengths": [length]}}}
    (folder / "_info.json").write_text(json.dumps(info))


COMMAND = "touch owned #.tar"


@pytest.mark.parametrize(
    "name",
    [f"pipe:{COMMAND}", "http://127.0.0.1:9/x.tar", "file:train-0.tar", "hf://a/b.tar", "x:train-0.tar",
     "../outside.tar", "sub/../../outside.tar", "/etc/passwd", "", ".", "-", "link.tar", "train-0.tar\0"],
)  # fmt: skip
@pytest.mark.parametrize("path", [".", "absolute"])
def test_names_in_the_info_file_are_those_of_files_in_the_folder(hostile: Path, name: str, path: str) -> None:
    (hostile / "link.tar").symlink_to("../outside.tar")
    write_info(hostile, name)
    with pytest.raises((ValueError, OSError), match=r".") as caught:
        labels(shards(hostile if path == "absolute" else path))
    assert "\n" not in str(caught.value)
    assert not (hostile / "owned").exists(), "a command was run"


@pytest.mark.parametrize("name", [f"pipe:{COMMAND}", f"train-pipe:{COMMAND}", f"pipe:{COMMAND[:-4]}-0.tar"])
@pytest.mark.parametrize("path", [".", "*", "pattern"])
def test_names_of_shards_are_not_commands(hostile: Path, name: str, path: str) -> None:
    (hostile / "train-0.tar").rename(hostile / name)
    asked = name if path == "pattern" else "." if path == "." else str(hostile)
    with pytest.raises(ValueError, match=r"plain name of a file|address or a command") as caught:
        labels(shards(asked))
    assert "\n" not in str(caught.value)
    assert not (hostile / "owned").exists(), "a command was run"


@pytest.mark.parametrize("asked", [f"pipe:{COMMAND}", "pipe:touch owned; cat train-{0..0}.tar", "http://h/{0..1}.tar"])
def test_patterns_are_not_commands(hostile: Path, asked: str) -> None:
    with pytest.raises(ValueError, match="is an address or a command: name a folder or tar files of this machine"):
        shards(asked)
    with pytest.raises((ValueError, OSError), match=r"plain name of a file|no shard at|no split"):
        shards(".", train_split=asked)
    assert not (hostile / "owned").exists()


def test_a_source_never_takes_a_name_for_a_command(hostile: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(ShardSource([f"pipe:{COMMAND}"], [1]).read(0))
    assert not (hostile / "owned").exists()


def test_shards_may_not_lead_out_of_their_folder(hostile: Path) -> None:
    (hostile / "train-1.tar").symlink_to("../outside.tar")
    for path in (hostile, ".", hostile / "train-{0..1}.tar"):
        with pytest.raises(ValueError, match=r"train-1\.tar is a link to a place outside of .*: copy the file into"):
            shards(path)
    with pytest.raises(ValueError, match="plain name of a file"):
        shards(".", train_split="../outside.tar")
    # Links inside of the folder are fine.
    (hostile / "train-1.tar").unlink()
    (hostile / "train-1.tar").symlink_to("train-0.tar")
    assert labels(shards(".")) == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.timeout(60)
def test_only_regular_files_are_shards(hostile: Path) -> None:
    os.mkfifo(hostile / "train-1.tar")
    for path in (".", "train-{0..1}.tar", "train-1.tar"):
        with pytest.raises(OSError, match=r"train-1\.tar is a named pipe, not a regular file"):
            shards(path)
    write_info(hostile, "train-1.tar")
    with pytest.raises(OSError, match=r"train-1\.tar is a named pipe"):
        shards(".")
    with pytest.raises(OSError, match=r"train-1\.tar is a named pipe"):
        list(ShardSource(["train-1.tar"], [1]).read(0))
    (hostile / "_info.json").unlink()
    os.mkfifo(hostile / "_info.json")
    with pytest.raises(OSError, match=r"_info\.json is a named pipe"):
        shards(".")


@pytest.mark.parametrize("length", [-1, 1.0, True, "3", None, [3], 10**30, 10**6, float("nan"), float("inf")])
def test_lengths_that_make_no_sense_are_refused(hostile: Path, length: Any) -> None:
    write_info(hostile, "train-0.tar", length)
    with pytest.raises(ValueError, match=r"_info\.json gives .* images for .*tar of .* which is not a whole num"):
        shards(".")


@pytest.mark.parametrize(
    "content",
    ["", "3", "[]", "[" * 100_000, "{}", '{"splits": []}', '{"splits": {"train": []}}',
     '{"splits": {"train": {"filenames": "train-0.tar", "shard_lengths": [3]}}}',
     '{"splits": {"train": {"filenames": ["train-0.tar"], "shard_lengths": [1, 2]}}}',
     '{"splits": {"train": {"filenames": [3], "shard_lengths": [3]}}}'],
)  # fmt: skip
def test_info_files_that_make_no_sense_are_refused(hostile: Path, content: str) -> None:
    (hostile / "_info.json").write_text(content)
    with pytest.raises(ValueError, match="correct or remove it"):
        shards(".")


def add(archive: tarfile.TarFile, name: str, kind: bytes, content: bytes = b"") -> None:
    item = tarfile.TarInfo(name)
    item.type, item.size, item.linkname = kind, len(content), "elsewhere"
    archive.addfile(item, io.BytesIO(content))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_pipes_in_a_shard_cannot_be_used(tmp_path: Path, kind: bytes) -> None:
    """They used to be left out without a word."""
    with tarfile.open(tmp_path / "train-0.tar", "w") as archive:
        add(archive, "a.jpg", kind)
        add(archive, "a.cls", tarfile.REGTYPE, b"1")
        add(archive, "b.jpg", tarfile.REGTYPE, image())
        add(archive, "b.cls", tarfile.REGTYPE, b"2")
    source = shards(tmp_path)
    assert len(source) == 2
    images = ShardImages(list(source.read(0)))
    with pytest.raises(OSError, match="cannot identify"):
        images.read(0)
    assert images.read(1)[1] == 2


def header(name: bytes, size: int, kind: bytes) -> bytes:
    """A header of a tar file that says anything."""
    field = b"%011o\0" % size if size < 8**11 else b"\x80" + struct.pack(">3xQ", size)
    block = bytearray(512)
    block[:100], block[124:136], block[156:157] = name.ljust(100, b"\0"), field, kind
    block[257:265] = b"ustar\x0000"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [10**6, 10**12, 2**62])
@pytest.mark.parametrize("kind", [b"0", b"x", b"L", b"g"])
def test_headers_that_promise_too_much_are_refused(tmp_path: Path, size: int, kind: bytes) -> None:
    (tmp_path / "train-0.tar").write_bytes(header(b"a.jpg", size, kind) + bytes(2048))
    with pytest.raises(ValueError, match=r"train-0\.tar is damaged or no plain tar file"):
        shards(tmp_path)
    with pytest.raises(ValueError, match=r"train-0\.tar is damaged or no plain tar file"):
        list(ShardSource([str(tmp_path / "train-0.tar")], [1]).read(0))


def test_headers_of_headers_end(tmp_path: Path) -> None:
    (tmp_path / "train-0.tar").write_bytes(header(b"a", 0, b"x") * 20_000 + bytes(2048))
    with pytest.raises(ValueError, match="damaged or no plain tar file"):
        shards(tmp_path)


def test_a_sparse_file_is_not_blown_up(tmp_path: Path) -> None:
    """A few bytes may stand for terabytes of zeros."""
    block = bytearray(header(b"a.jpg", 512, b"S"))
    block[386:398], block[398:410] = b"%011o\0" % 0, b"%011o\0" % 512
    block[483:495] = b"\x80" + struct.pack(">3xQ", 10**13)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    label = make_shard(tmp_path / "label.tar", [("a.cls", b"1")]).read_bytes()
    (tmp_path / "label.tar").unlink()
    (tmp_path / "train-0.tar").write_bytes(bytes(block) + bytes(512) + label)
    source = shards(tmp_path)
    assert len(source) == 1
    with pytest.raises(OSError, match="cannot identify"):
        ShardImages(list(source.read(0))).read(0)


def test_damage_in_the_middle_is_not_taken_for_the_end(folder: Path) -> None:
    content = bytearray((folder / "train-0.tar").read_bytes())
    with tarfile.open(folder / "train-0.tar") as archive:
        second = archive.getmembers()[2]
    content[second.offset : second.offset + 512] = b"x" * 512
    (folder / "train-0.tar").write_bytes(content)
    with pytest.raises(ValueError, match=r"train-0\.tar is damaged"):
        shards(folder)


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    make_shard(tmp_path / "train-0.tar", [("a.jpg", image()), ("a.JPG", image()), ("a.cls", b"1")])
    with pytest.raises(ValueError, match=r"has two files called a\.jpg: pack it again"):
        labels(shards(tmp_path))


def test_splits_that_do_not_exist_are_refused(folder: Path, tmp_path: Path) -> None:
    for wanted in ("test", "vall", "t", "..", "*", "."):
        with pytest.raises(ValueError, match=rf"no split called '{re.escape(wanted)}': .*eval_split among train, val,"):
            shards(folder, training=False, eval_split=wanted)
    with pytest.raises(ValueError, match=r"no split called 'small': choose with --data\.train_split among train, val,"):
        shards(folder, train_split="small")
    # Also where the folder is named for evaluation alone, and could be taken as a whole.
    (folder / "val-0.tar").unlink()
    with pytest.raises(ValueError, match=r"no split called val: choose with --data\.eval_split among train,"):
        shards(folder, training=False, eval_path=f"wds/{folder}")
    assert labels(shards(folder, training=False, eval_path=f"wds/{folder}", eval_split="train")) == [[1, 2, 3], [4, 5]]
    # Nor are shards for evaluation taken for training.
    make_shard(tmp_path / "other" / "imagenet-val-0.tar", samples([1]))
    with pytest.raises(ValueError, match=r"no split called train: .* among imagenet-val,"):
        shards(tmp_path / "other")
    make_shard(tmp_path / "parts" / "holdout" / "0.tar", samples([1]))
    with pytest.raises(ValueError, match=r"no split called train: .* among holdout,"):
        shards(tmp_path / "parts")
    write_info(folder, "train-0.tar", 3)
    with pytest.raises(ValueError, match=r"no split called 'test': .* among train,"):
        shards(folder, training=False, eval_split="test")


def test_shards_that_are_not_divided(tmp_path: Path) -> None:
    make_shard(tmp_path / "a" / "00.tar", samples([1]))
    make_shard(tmp_path / "a" / "x7.tar", samples([2]))
    assert labels(shards(tmp_path / "a")) == [[1], [2]]
    assert labels(shards(tmp_path / "a", False, eval_path=f"wds/{tmp_path}/a")) == [[1], [2]]
    for path in (tmp_path / "a", tmp_path / "a" / "00.tar"):
        with pytest.raises(ValueError, match="has no split called 'test'"):
            shards(path, False, eval_path=f"wds/{path}", eval_split="test")


def test_splits_may_be_spelled_in_several_ways(folder: Path) -> None:
    assert labels(shards(folder, training=False, eval_split="validation")) == [[6]]
    assert labels(shards(folder, train_split="training")) == [[1, 2, 3], [4, 5]]
    (folder / "val-0.tar").rename(folder / "test-0.tar")
    assert labels(shards(folder, training=False)) == [[6]], "it is not given, so test will do"
    with pytest.raises(ValueError, match="no split called 'validation'"):
        shards(folder, training=False, eval_split="validation")


def test_shards_of_other_splits_need_not_be_there(folder: Path) -> None:
    splits = {
        "train": {"filenames": ["train-8.tar"], "shard_lengths": [3]},
        "validation": {"filenames": ["val-0.tar"], "shard_lengths": [1]},
    }
    (folder / "_info.json").write_text(json.dumps({"splits": splits}))
    assert labels(shards(folder, training=False)) == [[6]]
    with pytest.raises(FileNotFoundError, match=r"no shard at .*train-8\.tar"):
        shards(folder)
