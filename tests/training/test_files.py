import json
from pathlib import Path

import pytest

from inlinevit.training import files
from inlinevit.training.files import replace_bytes, replace_json


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
