"""Where results may go: never onto what a command reads, and never onto the files of a training run."""

import os
from collections.abc import Iterable
from pathlib import Path

from ..utils.atomic import is_stream
from ..utils.validation import require
from .checkpoints import MANIFEST, STATE
from .runs import RUN_CHECKPOINTS, RUN_CONFIG, RUN_FILES, metadata_files

# What commands call the option that says where results go.
OPTION = "--output"
EMPTY = f"{OPTION} is empty: name where the results should go, or leave it out"


def check_output_file(output: str, inputs: Iterable[str | Path]) -> Path:
    """Return the path of a file for results; refuse one that must not be written to. Nothing on the disk is changed.

    Args:
        output: Where the results are to go; pipes and devices, such as /dev/stdout, are good.
        inputs: Files that are read; those that do not exist do no harm.
    """
    require(bool(output.strip()), EMPTY)
    path = Path(output)
    if is_stream(path):
        return path
    if path.is_dir() or output.endswith(os.sep):
        raise ValueError(f"{output} is a folder: name a file for the results with {OPTION}")
    _require_makeable(path.parent)
    _require_no_input(path, _identities(inputs))
    _require_no_run_file(path)
    return path


def check_output_folder(
    output: str,
    names: Iterable[str],
    *,
    inputs: Iterable[str | Path] = (),
    image_folders: Iterable[Path] = (),
) -> Path:
    """Return the path of a folder for results; refuse one that must not be written to. Nothing on the disk is changed.

    Args:
        output: Where the results are to go.
        names: The files that will be written there.
        inputs: Files that are read.
        image_folders: Folders whose images are read: files and folders among them would count as data.
    """
    require(bool(output.strip()), EMPTY)
    folder = Path(output)
    _require_makeable(folder)
    for images in image_folders:
        if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(images)):
            raise ValueError(f"{folder} lies in {images}, whose images are read: name another folder with {OPTION}")
    known = _identities(inputs)
    for name in names:
        if (folder / name).is_dir():
            raise ValueError(f"{folder / name} is a folder, but a file is to be written there: choose another {OPTION}")
        _require_no_input(folder / name, known)
        _require_no_run_file(folder / name)
    return folder


def check_run_output(output: str, inputs: Iterable[str | Path], metadata: Iterable[str] = ()) -> None:
    """Refuse the folder of a training run, if the files of the run and of its task would replace what it reads."""
    known = _identities(inputs)
    for name in (*RUN_FILES, *metadata):
        _require_no_input(Path(output) / name, known)


def _require_makeable(folder: Path) -> None:
    """Refuse a folder that cannot be made or written to."""
    place = Path(os.path.abspath(folder))
    existing = next(one for one in (place, *place.parents) if os.path.lexists(one))
    problem = ""
    if not existing.is_dir():
        problem = "File exists" if existing == place else f"{existing} is not a folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        problem = "Permission denied"
    if problem:
        raise OSError(f"{folder} cannot be a folder of results ({problem}): name another one")


def _identities(files: Iterable[str | Path]) -> dict[tuple[int, int], str]:
    """Files by what tells them from all others, whatever they are called and however often they are linked to."""
    found = {file: os.stat(file) for file in files if os.path.isfile(file)}
    return {(status.st_dev, status.st_ino): os.fspath(file) for file, status in found.items()}


def _require_no_input(path: Path, inputs: dict[tuple[int, int], str]) -> None:
    """Refuse a path that is one of the files that are read, by any name or link."""
    if not path.exists():
        return
    status = path.stat()
    same = inputs.get((status.st_dev, status.st_ino))
    if same is not None:
        linked = "" if os.path.abspath(same) == os.path.abspath(path) else f", which is the same file as {same}"
        raise ValueError(f"{path} is read by this command{linked}: name another output, so that it is not overwritten")


def _require_no_run_file(path: Path) -> None:
    """Refuse a path that belongs to a training run or to one of its checkpoints."""
    folder = Path(os.path.realpath(path.parent))
    for one in (folder, *folder.parents):
        is_checkpoint = (one / MANIFEST).is_file() and (one / STATE).is_file()
        holds_checkpoints = one.name == RUN_CHECKPOINTS and (one.parent / RUN_CONFIG).is_file()
        is_run_file = one == folder and (one / RUN_CONFIG).is_file() and path.name in (*RUN_FILES, *metadata_files(one))
        if is_checkpoint or holds_checkpoints or is_run_file:
            raise ValueError(f"{path} belongs to a training run: name another output, so that the run is not damaged")
