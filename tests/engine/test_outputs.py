"""Where results may go: never onto what is read, by whatever name or link, and never onto a run."""

import os
from pathlib import Path

import pytest

from inlinevit.engine.outputs import check_output_file, check_output_folder, check_run_output


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    (tmp_path / "photos").mkdir()
    file = tmp_path / "photos" / "photo.jpg"
    file.write_text("photo")
    return file


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    checkpoint = folder / "checkpoints" / "step-00000005"
    checkpoint.mkdir(parents=True)
    (folder / "config.yaml").touch()
    (folder / "task.json").write_text('{"files": ["classes.json"]}')
    for name in ("manifest.json", "state.json"):
        (checkpoint / name).touch()
    return folder


def test_an_input_is_no_output_by_any_name(photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, twin = tmp_path / "link.json", tmp_path / "twin.json"
    link.symlink_to(photo)
    twin.hardlink_to(photo)
    linked_folder = tmp_path / "album"
    linked_folder.symlink_to(photo.parent)
    monkeypatch.chdir(photo.parent)
    for output in (photo, link, twin, linked_folder / "photo.jpg", "photo.jpg", "../photos/photo.jpg"):
        with pytest.raises(ValueError, match=r"is read by this command.*: name another output"):
            check_output_file(str(output), [photo])
        # The same where the input is named by a link.
        with pytest.raises(ValueError, match="is read by this command"):
            check_output_file(str(output), [link])
    with pytest.raises(ValueError, match="which is the same file as"):
        check_output_folder(str(tmp_path), ["evaluation.json", "twin.json"], inputs=[photo])
    assert photo.read_text() == "photo"


def test_other_files_are_good(photo: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    for output in ("out.json", "new/deep/out.json"):
        assert check_output_file(str(tmp_path / output), [photo, tmp_path / "missing.jpg"]) == tmp_path / output
    check_output_folder(str(tmp_path / "new"), ["a.json"], inputs=[photo])
    for stream in (os.devnull, "/dev/stdout"):
        check_output_file(stream, [photo])
    assert sorted(tmp_path.rglob("*")) == before


def test_what_cannot_be_written(photo: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder: name a file"):
        check_output_file(str(tmp_path), [])
    with pytest.raises(ValueError, match="is a folder: name a file"):
        check_output_file(f"{tmp_path}/new/", [])
    for output in ("", " "):
        with pytest.raises(ValueError, match="--output is empty"):
            check_output_file(output, [])
        with pytest.raises(ValueError, match="--output is empty"):
            check_output_folder(output, [])
    with pytest.raises(OSError, match=r"photo\.jpg is not a folder\): name another one"):
        check_output_file(str(photo / "new" / "out.json"), [])
    with pytest.raises(OSError, match=r"photo\.jpg cannot be a folder of results \(File exists\): name another one"):
        check_output_folder(str(photo), [])
    with pytest.raises(ValueError, match="photos is a folder, but a file is to be written there"):
        check_output_folder(str(tmp_path), ["photos"])


def test_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not by its mode: root may write anywhere.
    monkeypatch.setattr(os, "access", lambda place, mode: place != tmp_path)
    with pytest.raises(OSError, match="Permission denied"):
        check_output_folder(str(tmp_path / "out"), [])


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "config.yaml",
        "classes.json",
        "metrics.jsonl",
        "results.json",
        "checkpoints/a.json",
        "checkpoints/step-00000005/a.json",
        "checkpoints/step-00000005/new/a.json",
    ],
)
def test_a_run_is_not_damaged(name: str, run: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(run)
    for output in (run / name, link / name):
        with pytest.raises(ValueError, match="belongs to a training run"):
            check_output_file(str(output), [])
        with pytest.raises(ValueError, match="belongs to a training run"):
            check_output_folder(str(output.parent), [output.name])
    check_output_file(str(run / "predictions.json"), [])
    check_output_folder(str(run / "evaluation"), ["evaluation.json", "results.json"])
    # Elsewhere, the same name is good.
    check_output_file(str(tmp_path / Path(name).name), [])


def test_results_do_not_go_among_images(photo: Path, tmp_path: Path) -> None:
    for folder in (photo.parent, photo.parent / "new" / "out"):
        with pytest.raises(ValueError, match="whose images are read: name another folder with --output"):
            check_output_folder(str(folder), [], image_folders=[photo.parent])
    check_output_folder(str(tmp_path), [], image_folders=[photo.parent])


def test_a_run_does_not_replace_the_weights_that_it_starts_from(run: Path) -> None:
    weights = run / "model.safetensors"
    weights.touch()
    with pytest.raises(ValueError, match="is read by this command"):
        check_run_output(str(run), [weights])
    check_run_output(str(run), [run.parent / "missing"])
