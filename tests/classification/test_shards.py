import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from inlinevit.classification.config import DataConfig
from inlinevit.classification.shards import ShardImages, ShardSource
from inlinevit.classification.sources import open_source


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
    source = open_source(DataConfig(path=f"wds/{path}", **options), training=training)
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
        ValueError, match=r"train-0.tar holds 3 images instead of 4: copy it anew, or correct _info.json"
    ):
        labels(shards(folder, train_split="small"))
    (folder / "_info.json").write_text('{"splits": {"small": {}}}')
    with pytest.raises(ValueError, match="correct or remove it"):
        shards(folder, train_split="small")


def test_thinned_shards_give_their_share(folder: Path) -> None:
    source = shards(folder)
    assert source.thinned(3).lengths == [1, 1]
    assert source.thinned(100).lengths == [3, 2]


def test_what_is_wrong_with_a_sample() -> None:
    stored = [
        {"__key__": "a", "__url__": "x.tar", "jpg": image()},
        {"__key__": "b", "__url__": "x.tar", "jpg": image(), "cls": b"cat"},
        {"__key__": "c", "__url__": "x.tar", "jpg": image(), "cls": b" 7\n"},
    ]
    images = ShardImages(stored)
    with pytest.raises(ValueError, match=r"no \.cls beside it"):
        images.read(0)
    with pytest.raises(ValueError, match="'cat', which is no whole number"):
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
