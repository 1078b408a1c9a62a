"""The state of an interrupted run: tokens after the last complete pass, in a folder from which it is resumed."""

import base64
import fcntl
import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..utils.atomic import atomic_write_json, disk_full_errors, make_output_dir
from ..utils.files import read_json
from .token_map import FileTokenMap

MANIFEST = "stream.json"
VERSION = 1


class Position(NamedTuple):
    """How far a run is.

    Attributes:
        stage: The stage whose tokens are saved.
        passes: Passes of the stage that are complete.
        prefix: Prefix tokens (prefix, channels).
        delivered: Names of the maps that were delivered.
        gathered: What steps of a decoder that are complete have gathered, by the name of the step.
    """

    stage: int
    passes: int
    prefix: Tensor
    delivered: tuple[str, ...]
    gathered: dict[str, list[Tensor]] = {}  # noqa: RUF012


class Checkpoint:
    """Two files of tokens in a folder, written in turn, and a manifest that names the valid one.

    Args:
        folder: The folder, which is made if there is none.
        fingerprint: Identifies model, image, and all else that the tokens depend on.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        make_output_dir(folder)
        self.folder, self.fingerprint, self.current = folder, fingerprint, 0
        self.descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self.descriptor)
            raise ValueError(
                f"another process streams with the state in {folder}: wait, or name another folder"
            ) from error

    def path(self, index: int) -> Path:
        """Return the path of one of the two files."""
        return self.folder / f"tokens-{index}.bin"

    def new_map(self, height: int, width: int, channels: int) -> FileTokenMap:
        """Return a map in the file that is not valid now, for new tokens."""
        path = self.path(1 - self.current)
        path.unlink(missing_ok=True)
        return FileTokenMap(height, width, channels, path=path)

    def open_map(self, height: int, width: int, channels: int) -> FileTokenMap:
        """Return the map of the valid file."""
        return FileTokenMap(height, width, channels, path=self.path(self.current))

    def advance(self, tokens: FileTokenMap, position: Position) -> None:
        """Make the tokens of new_map valid."""
        with disk_full_errors(self.folder):
            tokens.flush()
            self.current = 1 - self.current
            self.save(position)

    def kept_path(self, name: str) -> Path:
        """Return the path of a map that is kept."""
        return self.folder / f"map-{name}.bin"

    def keep(self, name: str) -> None:
        """Keep the tokens of the valid file under a name of their own, when that file is replaced."""
        path = self.kept_path(name)
        path.unlink(missing_ok=True)
        with disk_full_errors(self.folder):
            os.link(self.path(self.current), path)

    def save(self, position: Position) -> None:
        """Write the manifest."""
        prefix = _to_text(position.prefix)
        manifest: dict[str, Any] = {"version": VERSION, "fingerprint": self.fingerprint, "file": self.current}
        manifest |= {"stage": position.stage, "passes": position.passes, "prefix": prefix}
        if position.gathered:
            manifest["gathered"] = {
                name: [{"shape": list(one.shape), "values": _to_text(one)} for one in tensors]
                for name, tensors in position.gathered.items()
            }
        atomic_write_json(self.folder / MANIFEST, manifest | {"delivered": list(position.delivered)})

    def load(self, dims: list[int]) -> Position | None:
        """Return how far the run was; None if it has no complete pass.

        Args:
            dims: Channels of each stage.

        Raises:
            ValueError: The state is that of another image or model, or damaged.
        """
        path = self.folder / MANIFEST
        if not path.exists():
            return None
        try:
            manifest: Any = read_json(path)
            fingerprint, self.current = manifest["fingerprint"], int(manifest["file"])
            stage, passes = int(manifest["stage"]), int(manifest["passes"])
            tokens = _from_text(manifest["prefix"]).view(-1, dims[stage])
            delivered = tuple(map(str, manifest["delivered"]))
            gathered = {
                str(name): [_from_text(one["values"]).view(one["shape"]) for one in tensors]
                for name, tensors in manifest.get("gathered", {}).items()
            }
            is_valid = manifest["version"] == VERSION and self.path(self.current).is_file()
        except (ValueError, TypeError, KeyError, IndexError, RuntimeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: remove {self.folder}, and start again") from error
        if not is_valid or fingerprint != self.fingerprint:
            raise ValueError(
                f"{self.folder} has the state of another image, model or mask: remove it, or name another folder"
            )
        return Position(stage, passes, tokens, delivered, gathered)

    def remove(self) -> None:
        """Remove all files: the run is complete."""
        for path in (self.folder / MANIFEST, self.path(0), self.path(1), *self.folder.glob("map-*.bin")):
            path.unlink(missing_ok=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def close(self) -> None:
        """Let other processes use the folder."""
        os.close(self.descriptor)


def _to_text(values: Tensor) -> str:
    """Return the numbers of a tensor as text."""
    return base64.b64encode(values.contiguous().numpy().tobytes()).decode()


def _from_text(text: str) -> Tensor:
    """Return the numbers, (count,), of a text."""
    return torch.from_numpy(np.frombuffer(base64.b64decode(text, validate=True), np.float32).copy())


def fingerprint_of(model: nn.Module, *parts: object) -> str:
    """Return a digest of the weights of a model and of further values; tensors by their content."""
    digest = hashlib.sha256()
    for part in (type(model).__name__, *model.state_dict().items(), *parts):
        for value in part if isinstance(part, tuple) else (part,):
            if isinstance(value, Tensor):
                digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
                digest.update(cast(Any, value.detach().contiguous().view(-1).view(torch.uint8).numpy()))
            else:
                digest.update(f"{value!r};".encode())
    return digest.hexdigest()
