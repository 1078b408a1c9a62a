"""Pictures of evaluations."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from inlinevit.tasks.confusion_matrix import (
    confused_classes,
    confusion_matrix_section,
    draw_confusion_matrix,
    most_confused,
)
from tests import slow_except


def test_most_confused() -> None:
    confusion = torch.tensor([[9, 2, 0], [5, 9, 2], [0, 0, 9]])
    assert most_confused(confusion, 2) == [(1, 0, 5), (0, 1, 2)]
    assert most_confused(confusion, 9) == [(1, 0, 5), (0, 1, 2), (1, 2, 2)]
    assert most_confused(torch.eye(3), 9) == []


@pytest.mark.parametrize("classes", slow_except([2, 50, 1000], 50))
def test_pictures_are_large_enough_and_show_the_matrix(classes: int, tmp_path: Path) -> None:
    confusion = torch.eye(classes, dtype=torch.long) * 20
    confusion[0] = 0
    names = [f"no formula: $\\of_{{ $ [{index}]" for index in range(classes)]
    pictures = []
    for other in (0, 10):
        confusion[-1, 0] = other
        draw_confusion_matrix(confusion, names, tmp_path / "confusion.png")
        with Image.open(tmp_path / "confusion.png") as picture:
            pictures.append(np.asarray(picture.convert("RGB")).astype(int))
    # A pixel a class at least, and a mistake changes the picture.
    assert min(pictures[0].shape[:2]) > max(800, 1.5 * min(classes, 1000))
    assert pictures[0].shape == pictures[1].shape
    assert (pictures[0] != pictures[1]).any()


def test_a_picture_without_images_can_be_drawn(tmp_path: Path) -> None:
    draw_confusion_matrix(
        torch.zeros(60, 60, dtype=torch.long), [str(index) for index in range(60)], tmp_path / "none.png"
    )
    assert (tmp_path / "none.png").stat().st_size > 1000


def test_latex_is_not_started_for_names_of_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matplotlibrc in the current folder may ask for it."""
    from matplotlib import rc_context, texmanager

    def start(*arguments: object, **options: object) -> None:
        pytest.fail("LaTeX was started")

    monkeypatch.setattr(texmanager.TexManager, "_run_checked_subprocess", start)
    with rc_context({"text.usetex": True}):
        draw_confusion_matrix(torch.eye(3), ["\\input{x}", "b", "c"], tmp_path / "confusion.png")
    assert (tmp_path / "confusion.png").stat().st_size > 1000


@pytest.mark.integration
def test_the_page_has_the_most_confused_of_many_classes() -> None:
    confusion = torch.eye(3000, dtype=torch.long) * 4
    confusion[7, 2000], confusion[2000, 7], confusion[5, 6] = 3, 2, 1
    section = confusion_matrix_section(confusion, [f"<{index}>" for index in range(3000)])
    picture, table = section.blocks
    assert confused_classes(confusion, 20) == [5, 6, 7, 2000]
    assert confused_classes(confusion, 3) == [7, 2000]
    assert "4 of 3,000 classes" in picture.caption  # type: ignore[attr-defined]
    assert table.rows == [  # type: ignore[attr-defined]
        ["<7>", "<2000>", "3", "42.9"],
        ["<2000>", "<7>", "2", "33.3"],
        ["<5>", "<6>", "1", "20.0"],
    ]
    page = "".join(block.html() for block in section.blocks)
    assert "&lt;2000&gt;" in page
    assert "<2000>" not in page


def test_the_page_without_mistakes() -> None:
    (text,) = confusion_matrix_section(torch.eye(3), ["a", "b", "c"]).blocks
    assert "No class was taken for another one" in text.html()
