"""Files of predictions: results are written as they are made, kept if a job is stopped, and merged at its end.

While a job runs, there is a folder beside its output, OUTPUT.partial. In it, job.json has the settings that the results
depend on, and each process appends its results to a file of its own, part-PROCESS-NUMBER.jsonl, one line per image. A
job with the same settings continues where the former one has stopped, with any number of processes: it skips images
that have a line. When all images have one, they are merged in the order of the images, and the folder is removed.

A line has an id, made from the path, the size and the time of its image and from the name of its drawings: images that
are new or have changed since are predicted, and lines of those that are gone are left out. Lines that are not complete,
as a kill or a full disk leaves them, do not count.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor, nn

from ..data.images import ImageFiles
from ..utils.atomic import (
    UNFINISHED,
    atomic_path,
    atomic_text_writer,
    atomic_write_json,
    disk_full_errors,
    json_items,
    make_output_dir,
    path_beside,
)
from ..utils.files import open_regular, read_bytes, read_json
from ..utils.validation import require
from .config import PredictOptions, flattened, to_plain
from .lock import RUN_LOCK, RunLock
from .results import CLASS_WRITERS, from_class_record, shorten_list, write_parquet
from .runs import RUN_CONFIG, has_config, metadata_files

PARTIAL = ".partial"
JOB_JSON = "job.json"
PART = re.compile(r"part-\d+-\d+\.jsonl")
# Options that do not change what is predicted. The weights of the checkpoint are compared instead of its name.
FREE_OPTIONS = ("batch_size", "checkpoint", "device", "format", "output", "resume")
START_OVER = "start over with --resume never"

Record = dict[str, Any]


class Line(NamedTuple):
    """Where the result of an image is.

    Attributes:
        part: The name of the file.
        offset: The first byte of its line.
        is_error: Whether the image could not be used.
    """

    part: str
    offset: int
    is_error: bool


class PartialResults:
    """The results of a job that is not finished, in a folder beside its output.

    Args:
        output: The file that they will be merged into.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.folder = path_beside(output, output.name, PARTIAL)

    @contextmanager
    def open(self, settings: Mapping[str, Any], facts: Mapping[str, Any], *, start_over: bool) -> Iterator[None]:
        """Create or continue the job, in the main process, and exclude others while the context lasts.

        If nothing was predicted in it, the folder is removed at the end.

        Args:
            settings: What the results depend on; a job with other settings is refused.
            facts: Further fields of job.json, for people.
            start_over: Remove what a former job has left.
        """
        self._check_folder()
        plain = json.loads(json.dumps(settings))
        make_output_dir(self.folder)
        try:
            with disk_full_errors(self.output), RunLock(self.folder, option="--output"):
                if start_over or not (self.folder / JOB_JSON).exists():
                    self._remove_files()
                    atomic_write_json(self.folder / JOB_JSON, {**facts, "settings": plain})
                else:
                    self._check_settings(plain)
                try:
                    yield
                finally:
                    if not any(part.stat().st_size for part in self._parts()):
                        self._remove_files()
        finally:
            # It is not empty if there are results.
            with suppress(OSError):
                self.folder.rmdir()

    def _parts(self) -> list[Path]:
        return sorted(file for file in self.folder.iterdir() if PART.fullmatch(file.name))

    def _check_folder(self) -> None:
        """Refuse a folder that was not made by a job: nothing in it may be removed."""
        if not os.path.lexists(self.folder):
            return
        remedy = "remove it, or name another --output"
        require(
            self.folder.is_dir() and not self.folder.is_symlink(),
            f"{self.folder}, where partial results would be, is not a folder: {remedy}",
        )
        own = (JOB_JSON, RUN_LOCK, f".{JOB_JSON}{UNFINISHED}")
        others = sorted(name for name in os.listdir(self.folder) if name not in own and not PART.fullmatch(name))
        require(
            not others,
            f"{self.folder}, where partial results would be, has other files ({shorten_list(others)}): {remedy}",
        )

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        """Refuse to continue a job with other settings."""
        other_ways = f"name another --output, or {START_OVER}"
        try:
            before = flattened(read_json(self.folder / JOB_JSON)["settings"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{self.folder / JOB_JSON} is damaged: {other_ways}") from error
        now = flattened(dict(settings))
        changed = [
            f"{name} was {before.get(name)} and is {now.get(name)}"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name)
        ]
        require(
            not changed,
            f"{self.folder} holds results of a job with other settings ({'; '.join(changed)}): finish that one, "
            f"{other_ways}",
        )

    def _remove_files(self) -> None:
        """Remove all results; job.json first, because results without it are not used."""
        (self.folder / JOB_JSON).unlink(missing_ok=True)
        for part in self._parts():
            part.unlink()

    @contextmanager
    def write_part(self, process: int) -> Iterator[tuple[str, Callable[[str, Record], None]]]:
        """Open a new file of a process: the context gives its name, and the function that writes an id and a record."""
        require(
            (self.folder / JOB_JSON).is_file(),
            f"{self.folder} of the main process is not seen by process {process}: all machines need a shared folder, "
            "name one with --output",
        )
        with disk_full_errors(self.output), self._new_part(process) as stream:

            def write(identity: str, record: Record) -> None:
                stream.write(json.dumps({"id": identity, **record}).encode() + b"\n")
                # A kill must not lose it.
                stream.flush()

            yield Path(stream.name).name, write
            os.fsync(stream.fileno())

    def _new_part(self, process: int) -> BinaryIO:
        number = 0
        while True:
            try:
                return open(self.folder / f"part-{process:05d}-{number:05d}.jsonl", "xb")
            except FileExistsError:
                number += 1

    def lines(self, parts: Iterable[str] = ()) -> dict[str, Line]:
        """Return where the results are, by id.

        Args:
            parts: Names of files that exist, even if this machine does not list them yet.
        """
        found: dict[str, Line] = {}
        for part in sorted({*parts, *(file.name for file in self._parts())}):
            offset = 0
            with open_regular(self.folder / part) as stream:
                for line in stream:
                    record = _parse_line(line)
                    if record is not None:
                        found[record["id"]] = Line(part, offset, "error" in record)
                    offset += len(line)
        return found

    def records(self, ids: Sequence[str], lines: Mapping[str, Line]) -> Iterator[Record]:
        """Yield the results of images in their order."""
        with ExitStack() as stack:
            streams: dict[str, BinaryIO] = {}
            for identity in ids:
                line = lines[identity]
                if line.part not in streams:
                    streams[line.part] = stack.enter_context(open_regular(self.folder / line.part))
                streams[line.part].seek(line.offset)
                record = json.loads(streams[line.part].readline())
                del record["id"]
                yield record

    def merge(self, ids: Sequence[str], format: str, parts: Iterable[str] = ()) -> int:
        """Write the output, and remove the partial results.

        Args:
            ids: All images, in their order.
            format: One of the formats of class predictions, or "records" for a JSON list of the records as they are.
            parts: See lines().

        Returns:
            How many images could not be used.
        """
        lines = self.lines(parts)
        missing = sum(identity not in lines for identity in ids)
        require(
            missing == 0,
            f"the results of {missing} images are not in {self.folder}: run the same command again, with an --output "
            "that all machines share",
        )
        records = self.records(ids, lines)
        if format == "parquet":
            with atomic_path(self.output) as aside:
                write_parquet(map(from_class_record, records), aside)
        else:
            # csv writes its own line endings.
            with atomic_text_writer(self.output, newline="") as stream:
                if format == "records":
                    with json_items(stream) as write:
                        for record in records:
                            write(record)
                else:
                    CLASS_WRITERS[format](map(from_class_record, records), stream)
        self._remove_files()
        return sum(lines[identity].is_error for identity in ids)


def _parse_line(line: bytes) -> Record | None:
    """Return the content of a line; None if it is not complete."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("id"), str) else None


def image_ids(files: ImageFiles, names: Sequence[str]) -> list[str]:
    """Return an id for each image: another one if the file changes, or the name of its drawings ("" = it has none)."""
    ids = []
    for (path, _), name in zip(files.files, names, strict=True):
        try:
            status = os.stat(path)
            state = f"{status.st_size} {status.st_mtime_ns}"
        except OSError:
            state = "missing"
        content = b"\0".join([os.fsencode(path), state.encode(), os.fsencode(name)])
        ids.append(hashlib.sha256(content).hexdigest()[:24])
    return ids


def job_settings(task: str, model: str, network: nn.Module, options: PredictOptions) -> dict[str, Any]:
    """Return what predictions depend on: the model's weights, the run's files and the options.

    Args:
        task: The name of the task.
        model: The folder of a run, or a name.
        network: The model that was loaded.
        options: The options of `predict`.
    """
    plain = {name: value for name, value in to_plain(options).items() if name not in FREE_OPTIONS}
    folder = Path(model)
    names = (RUN_CONFIG, *metadata_files(folder)) if has_config(model) else ()
    run = {name: _digest([read_bytes(folder / name)]) for name in names if (folder / name).is_file()}
    return {"task": task, "weights": _digest(_weight_bytes(network)), "run": run, "options": plain}


def _weight_bytes(network: nn.Module) -> Iterator[bytes]:
    for name, value in sorted(network.state_dict().items()):
        if isinstance(value, Tensor):
            yield f"{name} {value.dtype} {tuple(value.shape)}".encode()
            yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]
