import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from inlinevit.tasks.segmentation.config import SegmentationDataConfig
from inlinevit.tasks.segmentation.labels import (
    IGNORED,
    LabelMap,
    SegmentationClass,
    ade_labels,
    fill_in_colours,
    open_labels,
    read_labels,
    voc_colour,
)

STREETS = """
ignored: [0, 255]
classes:
  - name: road
    values: [7, 8]
    colour: [128, 64, 128]   # optional
  - name: sky
    values: [23]
  - name: far away
    values: [40000]
"""


def write(folder: Path, content: Any) -> Path:
    file = folder / "labels.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return file


def classes(*records: dict[str, Any]) -> dict[str, Any]:
    """The content of a file with these classes, and two more at its beginning."""
    return {"classes": [{"name": "one", "values": [1]}, {"name": "two", "values": [2]}, *records]}


def test_a_file_says_what_values_mean(tmp_path: Path) -> None:
    labels = read_labels(write(tmp_path, STREETS))
    assert [kind.name for kind in labels.classes] == ["road", "sky", "far away"]
    assert labels.classes[0] == SegmentationClass("road", [7, 8], (128, 64, 128))
    values = np.array([[7, 8, 23], [0, 255, 40000]], np.uint16)
    expected = torch.tensor([[0, 0, 1], [IGNORED, IGNORED, 2]], dtype=torch.uint8)
    for given_values in (values, values.astype(">u2"), torch.from_numpy(values.astype(np.int32))):
        found = labels.to_indices(given_values)
        assert found.dtype == torch.uint8
        assert torch.equal(found, expected)


@pytest.mark.parametrize("value", [1, 9, 65535, 65536, -1, 10**9])
def test_the_first_value_without_meaning_is_named(tmp_path: Path, value: int) -> None:
    labels = read_labels(write(tmp_path, STREETS))
    with pytest.raises(ValueError, match=rf"the value {value}, which is neither one of the 3 classes nor ignored"):
        labels.to_indices(np.array([[7, value], [5, 0]]))


def test_indices_become_values_again(tmp_path: Path) -> None:
    labels = read_labels(write(tmp_path, STREETS))
    indices = torch.tensor([[0, 1, 2, IGNORED]])
    for kind in (torch.uint8, torch.int64):
        values = labels.to_values(indices.to(kind))
        assert values.dtype == torch.uint16
        # A class with several values, and what is ignored: the first.
        assert values.tolist() == [[7, 23, 40000, 0]]
    values = ade_labels(150).to_values(torch.tensor([[0, 149, IGNORED]]))
    assert values.dtype == torch.uint8
    assert values.tolist() == [[1, 150, 0]]


@pytest.mark.parametrize("ignored", [None, [], "absent"])
def test_nothing_need_be_ignored(tmp_path: Path, ignored: Any) -> None:
    content = classes() if ignored == "absent" else {"ignored": ignored, **classes()}
    labels = read_labels(write(tmp_path, content))
    assert labels.to_indices(np.array([[1, 2]])).tolist() == [[0, 1]]
    with pytest.raises(ValueError, match="the value 0"):
        labels.to_indices(np.array([[0]]))


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_labels_come_back_from_their_plain_form(data: st.DataObject) -> None:
    values = data.draw(st.lists(st.integers(0, 65535), min_size=4, max_size=40, unique=True))
    first, second = sorted(data.draw(st.lists(st.integers(1, len(values) - 1), min_size=2, max_size=2, unique=True)))
    own = [values[:first], values[first:second]]
    labels = LabelMap(
        [SegmentationClass("a", own[0], (1, 2, 3)), SegmentationClass("b", own[1], (4, 5, 6))], values[second:]
    )
    again = LabelMap.from_plain(json.loads(json.dumps(labels.to_plain())), "labels.json")
    assert again.classes == labels.classes
    assert torch.equal(again.lookup, labels.lookup)
    pixels = np.array([values])
    indices = again.to_indices(pixels)
    assert torch.equal(again.to_indices(again.to_values(indices)), indices)


def test_ade_has_classes_from_one() -> None:
    labels = ade_labels(150)
    assert [kind.name for kind in labels.classes] == [str(number) for number in range(1, 151)]
    values = np.arange(151, dtype=np.uint8).reshape(1, -1)
    assert labels.to_indices(values).tolist() == [[IGNORED, *range(150)]]
    for value in (151, 255):
        with pytest.raises(ValueError, match=f"the value {value}, which is neither one of the 150 classes nor ignored"):
            labels.to_indices(np.full((2, 2), value, np.uint8))
    assert len(ade_labels(254).classes) == 254


@pytest.mark.parametrize("count", [0, 1, 255])
def test_numbers_of_classes_that_cannot_be(count: int) -> None:
    with pytest.raises(ValueError, match=rf"model.num_classes is {count}: it should be from 2 to 254"):
        ade_labels(count)


def test_colours_differ_and_those_stated_are_not_taken_again() -> None:
    assert len({kind.colour for kind in ade_labels(254).classes}) == 254
    assert voc_colour(0) == (0, 0, 0)
    # PASCAL VOC's aeroplane, bicycle, person and void.
    assert [voc_colour(number) for number in (1, 2, 15, 255)] == [
        (128, 0, 0),
        (0, 128, 0),
        (192, 128, 128),
        (224, 224, 192),
    ]
    assert fill_in_colours([None, (128, 0, 0), None]) == [(0, 128, 0), (128, 0, 0), (128, 128, 0)]


MISTAKES: list[tuple[Any, str]] = [
    ("", "FILE has no list of classes: write"),
    ("[1, 2]", "FILE has no list of classes: write"),
    ({"ignored": [0]}, "FILE has no list of classes: write"),
    ({"classes": {"road": [1]}}, "FILE has no list of classes: write"),
    ({**classes(), "ignore": [0]}, "FILE has a field ignore, which means nothing here: did you mean ignored"),
    ({"classes": []}, "FILE has 0 classes: give it from 2 to 254"),
    ({"classes": classes()["classes"][:1]}, "FILE has 1 classes: give it"),
    ({"classes": [{"name": f"{n}", "values": [n]} for n in range(255)]}, "FILE has 255 classes: give it from 2 to 254"),
    (classes({"values": [3]}), "class 3 in FILE has no name: give it one"),
    (classes({"name": 3, "values": [3]}), "class 3 in FILE has no name: give it one, in quotes"),
    (classes({"name": " ", "values": [3]}), "class 3 in FILE has no name"),
    ({"classes": ["road", "sky"]}, "class 1 in FILE has no name"),
    (classes({"name": "two", "values": [3]}), "FILE has two classes called two: give"),
    (classes({"name": "three", "value": [3]}), "class three in FILE has a field value, .* did you mean values"),
    (classes({"name": "three", "values": [3], "x": 1}), "class three in FILE has a field x, .* there are name, values"),
    (classes({"name": "three"}), "class three in FILE has no values: add them"),
    (classes({"name": "three", "values": []}), "class three in FILE has no values: add them"),
    (classes({"name": "three", "values": 3}), "FILE has the values 3 for three: write a list"),
    (classes({"name": "three", "values": [3.0]}), r"FILE has the values \[3.0\] for three: write a list"),
    (classes({"name": "three", "values": [True]}), r"FILE has the values \[True\] for three"),
    (classes({"name": "three", "values": [-1]}), r"FILE has the values \[-1\] for three"),
    (classes({"name": "three", "values": [65536]}), r"FILE has the values \[65536\] for three"),
    (classes({"name": "three", "values": [3, 2]}), "FILE has the value 2 twice, for two and for three: remove"),
    (classes({"name": "three", "values": [3, 3]}), "FILE has the value 3 twice, for three and for three: remove"),
    ({"ignored": [0, 1], **classes()}, "FILE has the value 1 twice, for ignored and for one: remove"),
    ({"ignored": 0, **classes()}, "FILE has the values 0 for ignored: write a list"),
    *[
        (
            classes({"name": "three", "values": [3], "colour": colour}),
            "class three in FILE has the colour .*: write red",
        )
        for colour in ([1, 2], [1, 2, 3, 4], [1, 2, 256], [1, -2, 3], [0.1, 0.2, 0.3], "red", [True, 2, 3], 5)
    ],
    ("classes: [", "FILE is not valid YAML .*: fix it"),
    ("!!python/object/apply:os.getcwd []", "FILE is not valid YAML .*: fix it"),
]


@pytest.mark.parametrize(("content", "message"), MISTAKES)
def test_files_that_make_no_sense_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    file = write(tmp_path, content)
    with pytest.raises(ValueError, match="^" + message.replace("FILE", str(file))) as refused:
        read_labels(file)
    assert "\n" not in str(refused.value)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "labels.yaml"
    file.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match=rf"^{file} is not valid YAML"):
        read_labels(file)


def test_the_labels_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, STREETS)
    named = SegmentationDataConfig(labels=str(file))
    assert [len(open_labels(named, count).classes) for count in (None, 3)] == [3, 3]
    with pytest.raises(ValueError, match=rf"^{file} has 3 classes, but model.num_classes is 4: leave it out"):
        open_labels(named, 4)
    assert len(open_labels(SegmentationDataConfig(), 11).classes) == 11
    with pytest.raises(ValueError, match=r"set --model.num_classes \(150 for ADE20K\), or .* --data.labels$"):
        open_labels(SegmentationDataConfig(), None)
    with pytest.raises(FileNotFoundError, match=r"no file of labels at nowhere.yaml: .* --data.labels$"):
        open_labels(SegmentationDataConfig(labels="nowhere.yaml"), None)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(open_labels(SegmentationDataConfig(labels="~/labels.yaml"), None).classes) == 3
