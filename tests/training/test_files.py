import json
from pathlib import Path

import pytest

from inlinevit.training import files
from inlinevit.training.files import json_list, replace_bytes, replace_json


def test_content_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    replace_json(path, {"a": "é"})
    replace_json(path, {"b": [1]})
    assert json.loads(path.read_text()) == {"b": [1]}
    assert [file.name for file in path.parent.iterdir()] == ["file.json"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "^no space left on the disk for .*file: free some"),
        (OSError(122, "Disk quota exceeded"), "^no space left on the disk for .*file: free some"),
        (OSError(27, "File too large"), "^no space left on the disk for .*file: free some"),
        (PermissionError(13, "Permission denied"), "Permission denied"),
    ],
)
def test_failure_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, message: str
) -> None:
    path = tmp_path / "file"
    replace_bytes(path, b"old")

    def fail(aside: Path, content: bytes) -> None:
        aside.write_bytes(content[:1])
        raise error

    monkeypatch.setattr(files, "write_bytes", fail)
    with pytest.raises(OSError, match=message):
        replace_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("items", [[], [{"name": "ä"}], [1, "two", None]])
def test_a_list_is_written_item_by_item(items: list[object], tmp_path: Path) -> None:
    with json_list(tmp_path / "list.json") as write:
        for item in items:
            write(item)
    assert json.loads((tmp_path / "list.json").read_text(encoding="utf-8")) == items


def test_a_list_that_is_broken_off_is_json_all_the_same(tmp_path: Path) -> None:
    def break_off() -> None:
        with json_list(tmp_path / "list.json") as write:
            write({"a": 1})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert json.loads((tmp_path / "list.json").read_text()) == [{"a": 1}]
