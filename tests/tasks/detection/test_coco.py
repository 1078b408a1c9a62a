import io
import json
import os
import re
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from pycocotools import mask as coco_masks
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from inlinevit.tasks.detection.coco import Category, CocoSource, PackedLists, _run_lengths, open_coco
from inlinevit.tasks.detection.config import DetectionDataConfig

FILE = "annotations/instances_train2017.json"
# Of pycocotools itself.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
DrawCoco = Callable[..., Path]


def opened(folder: Path, training: bool = True, **options: Any) -> CocoSource:
    return open_coco(DetectionDataConfig(path=str(folder), **options), training)


def change(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Have `edit` change the content of the annotations for training."""
    content = json.loads((folder / FILE).read_text())
    edit(content)
    (folder / FILE).write_text(json.dumps(content))


def objects_of(content: dict[str, Any], image: int) -> list[dict[str, Any]]:
    return [annotation for annotation in content["annotations"] if annotation["image_id"] == image]


def test_images_and_categories_are_in_the_order_of_their_ids(coco_folder: DrawCoco) -> None:
    folder = coco_folder()
    source = opened(folder)
    assert source.categories == [Category(3, "disc"), Category(7, "square"), Category(90, "triangle")]
    assert [record["id"] for record in source.images] == list(range(10, 34, 3))
    assert len(source) == 8
    assert len(opened(folder, training=False)) == 4
    assert source.name(1) == f"{folder}/train2017/0001.png (image id 13)"


def test_targets_are_what_the_picture_shows(coco_folder: DrawCoco) -> None:
    source = opened(coco_folder())
    seen = set()
    for index in range(len(source)):
        image, target = source.read_image(index), source.read_target(index)
        pixels = torch.from_numpy(np.array(image)).to(torch.float32)
        assert image.mode == "RGB"
        assert target["masks"].shape[1:] == pixels.shape[:2]
        for box, label, mask in zip(target["boxes"], target["labels"], target["masks"], strict=True):
            seen.add(int(label))
            # Red, green and blue, in the order of ids.
            assert int(pixels[mask.bool()].mean(0).argmax()) + 1 == int(label)
            rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
            around = torch.stack([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
            torch.testing.assert_close(box, around.to(torch.float32), rtol=0, atol=1.1)
    assert seen == {1, 2, 3}


def test_masks_are_the_same_however_they_are_written(draw_coco: DrawCoco, tmp_path: Path) -> None:
    kinds = ("polygon", "counts", "rle")
    first, *others = (opened(draw_coco(tmp_path / kind, segmentation=kind)) for kind in kinds)
    for index in range(len(first)):
        expected = first.read_target(index)
        assert {name: values.dtype for name, values in expected.items()} == {
            "boxes": torch.float32,
            "labels": torch.int64,
            "masks": torch.uint8,
        }
        for other in others:
            torch.testing.assert_close(other.read_target(index), expected, rtol=0, atol=0)


def test_crowds_are_for_evaluation_alone(coco_folder: DrawCoco) -> None:
    folder = coco_folder(crowds=2)
    source = opened(folder)
    content = json.loads((folder / FILE).read_text())
    objects = objects_of(content, 10)
    assert [annotation["iscrowd"] for annotation in objects][-1] == 1
    assert len(source.read_target(0)["labels"]) == len(objects) - 1
    truth = source.ground_truth()
    assert truth["annotations"] == content["annotations"]
    assert truth["images"] == content["images"][::-1]


def test_images_without_objects_stay(coco_folder: DrawCoco) -> None:
    source = opened(coco_folder(empty=8, crowds=0))
    target = source.read_target(1)
    assert {name: tuple(values.shape) for name, values in target.items()} == {
        "boxes": (0, 4),
        "labels": (0,),
        "masks": (0, 96, 64),
    }
    assert target["boxes"].dtype == torch.float32
    assert target["labels"].dtype == torch.int64
    assert source.ground_truth()["annotations"] == []


def test_the_first_images_alone(coco_folder: DrawCoco) -> None:
    folder = coco_folder()
    for number in range(2, 8):
        (folder / "train2017" / f"{number:04d}.png").unlink()
    source = opened(folder, max_train_samples=2)
    assert [record["id"] for record in source.images] == [10, 13]
    truth = source.ground_truth()
    assert {annotation["image_id"] for annotation in truth["annotations"]} == {10, 13}
    assert len(opened(folder, training=False, max_eval_samples=100)) == 4


def test_missing_fields_are_filled_in_for_evaluation(coco_folder: DrawCoco) -> None:
    folder = coco_folder(crowds=0)
    complete = opened(folder).ground_truth()["annotations"]

    def forget(content: dict[str, Any]) -> None:
        for annotation in content["annotations"]:
            del annotation["iscrowd"], annotation["area"]

    change(folder, forget)
    assert opened(folder).ground_truth()["annotations"] == complete


def test_a_perfect_answer_is_perfect_for_coco(coco_folder: DrawCoco) -> None:
    folder = coco_folder({"train2017": 30})

    def from_zero(content: dict[str, Any]) -> None:
        for annotation in content["annotations"]:
            annotation["id"] -= 1

    # pycocotools would miss the object with the id 0.
    change(folder, from_zero)
    source = opened(folder)
    with redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = source.ground_truth()
        truth.createIndex()
        answers = []
        for index, image in enumerate(source.images):
            target = source.read_target(index)
            for label, mask in zip(target["labels"], target["masks"], strict=True):
                category = source.categories[int(label) - 1].id
                code = coco_masks.encode(np.asfortranarray(mask.numpy()))
                answers.append({"image_id": image["id"], "category_id": category, "score": 0.9, "segmentation": code})
        evaluation = COCOeval(truth, truth.loadRes(answers), "segm")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    # Average precision, and recall of up to 100.
    assert evaluation.stats[0] == evaluation.stats[8] == 1


def test_boxes_end_with_the_image(coco_folder: DrawCoco) -> None:
    folder = coco_folder(crowds=0)
    change(folder, lambda content: objects_of(content, 10)[0].update(bbox=[-5.5, 60, 200, 20]))
    source = opened(folder)
    assert source.read_target(0)["boxes"][0].tolist() == [0, 60, 96, 64]
    assert source.ground_truth()["annotations"][0]["bbox"] == [-5.5, 60, 200, 20]


def test_boxes_of_whole_numbers_are_floats_as_well(coco_folder: DrawCoco) -> None:
    folder = coco_folder(objects=1, crowds=0)
    change(folder, lambda content: content["annotations"][0].update(bbox=[5, 6, 10, 20]))
    boxes = opened(folder).read_target(0)["boxes"]
    torch.testing.assert_close(boxes, torch.tensor([[5.0, 6, 15, 26]]), rtol=0, atol=0)


WITHOUT_AREA: list[dict[str, Any]] = [
    {"bbox": [5, 5, 0, 10]},
    {"bbox": [5, 5, 10, 1e-9]},
    {"bbox": [96, 5, 10, 10]},
    {"bbox": [-20, 5, 20, 10]},
    {"bbox": [5, 5, 1, 1], "segmentation": [[5.0, 5, 5.01, 5, 5, 5.01]]},
    {"bbox": [5, 5, 30, 30], "area": 0.1, "segmentation": [[5.0, 5, 35, 35, 5, 5.01]]},
    {"segmentation": {"size": [64, 96], "counts": [64 * 96]}},
    {
        "segmentation": {
            "size": [64, 96],
            "counts": coco_masks.encode(np.zeros((64, 96), np.uint8, "F"))["counts"].decode(),
        }
    },
]


@pytest.mark.parametrize("fields", WITHOUT_AREA)
def test_objects_without_area_are_left_out_with_a_word(coco_folder: DrawCoco, fields: dict[str, Any]) -> None:
    folder = coco_folder(objects=1, crowds=0)
    change(folder, lambda content: content["annotations"][0].update(fields))
    with pytest.warns(UserWarning, match=rf"1 objects in {folder}/{FILE} .* annotations 1$"):
        source = opened(folder)
    assert len(source.read_target(0)["labels"]) == 0
    assert source.ground_truth()["annotations"][0].items() >= fields.items()
    assert len(source.read_target(1)["labels"]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened(folder, training=False, eval_split="train2017")


def test_one_warning_counts_all(coco_folder: DrawCoco) -> None:
    folder = coco_folder(objects=1, crowds=0)
    change(folder, lambda content: [annotation.update(bbox=[0, 0, 0, 0]) for annotation in content["annotations"]])
    with pytest.warns(UserWarning, match=r"^7 objects .* annotations 1, 2, 3, 4, 5, …$") as told:
        opened(folder)
    assert len([warning for warning in told if warning.category is UserWarning]) == 1


def rle(counts: Any, size: Any = (64, 96)) -> dict[str, Any]:
    return {"segmentation": {"size": list(size), "counts": counts}}


ANNOTATION_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"image_id": 11}, "image_id 11, which the file does not have"),
    ({"image_id": 10.0}, "image_id 10.0, which"),
    ({"category_id": 4}, "category_id 4, which the file does not have"),
    ({"category_id": None}, "category_id None, which"),
    ({"bbox": [1, 2, 3]}, "four numbers"),
    ({"bbox": None}, "four numbers"),
    ({"bbox": [1, 2, "3", 4]}, "four numbers"),
    ({"bbox": [1, 2, float("nan"), 4]}, "four numbers"),
    ({"bbox": [1, float("-inf"), 3, 4]}, "four numbers"),
    ({"bbox": [1, 2, 3, -4]}, "negative"),
    ({"area": "large"}, "number of pixels"),
    ({"iscrowd": "0"}, "0 or 1"),
    ({"segmentation": None}, "has no segmentation"),
    ({"segmentation": []}, "has no segmentation"),
    ({"segmentation": [[1, 2, 3, 4]]}, "a polygon of 4 numbers"),
    ({"segmentation": [[1, 2, 30, 4, 5, 60], [1, 2, 3, 4, 5, 6, 7]]}, "a polygon of 7 numbers"),
    ({"segmentation": [[1, 2, 3, 4, 5, float("nan")]]}, "not a list of numbers"),
    ({"segmentation": [[1, 2, 3, 4, 5, 1e9]]}, "not a list of numbers"),
    ({"segmentation": [1, 2, 3, 4, 5, 6]}, "not a list of numbers"),
    ({"segmentation": "polygon"}, "neither a list of polygons nor RLE"),
    ({"segmentation": {"size": [64, 96]}}, "neither a list of polygons nor RLE"),
    (rle([64 * 96], (96, 64)), r"size \[96, 64\], but its image has \[64, 96\]"),
    (rle([5, 5]), "do not add up"),
    (rle([5, 5, 64 * 96]), "do not add up"),
    (rle([-5, 5 + 64 * 96]), "do not add up"),
    (rle([5.0, 64 * 96 - 5.0]), "do not add up"),
    (rle(""), "do not add up"),
    (rle("abc"), "do not add up"),
    (rle("é"), "do not add up"),
]


@pytest.mark.parametrize(("fields", "message"), ANNOTATION_MISTAKES)
def test_annotations_that_make_no_sense_are_refused(
    coco_folder: DrawCoco, fields: dict[str, Any], message: str
) -> None:
    folder = coco_folder({"train2017": 3}, empty=0)
    change(folder, lambda content: objects_of(content, 10)[0].update(fields))
    with pytest.raises(ValueError, match=rf"^annotation 1 in {folder}/{FILE} (?=.*{message}).*: \w+"):
        opened(folder)


Edit = Callable[[dict[str, Any]], Any]
FILE_MISTAKES: list[tuple[Edit, str]] = [
    (lambda content: content["images"][0].pop("width"), "image 16 in FILE has the width None"),
    (lambda content: content["images"][0].update(height=0), "image 16 in FILE has the width 80 and the height 0"),
    (lambda content: content["images"][0].update(height="80"), "image 16 in FILE has the width 80 and the height '80'"),
    (lambda content: content["images"][0].update(height=9_000), "image 16 in FILE has 80 × 9000 pixels, which show no"),
    (
        lambda content: content["images"][0].update(height=90_000, width=90_000),
        "more than the limit of",
    ),
    (lambda content: content["images"][0].pop("file_name"), "image 16 in FILE has no file_name"),
    (lambda content: content["images"][0].update(file_name="../train2017/0002.png"), "leads out of the folder"),
    (lambda content: content["images"][0].update(file_name="/0002.png"), "leads out of the folder"),
    (lambda content: content["images"][0].update(id=10), "FILE has two images with the id 10"),
    (lambda content: content["images"][1].pop("id"), "record 1 of the images in FILE has the id None"),
    (lambda content: content["annotations"][1].update(id=1), "FILE has two annotations with the id 1"),
    (lambda content: content["categories"][1].update(id=90), "FILE has two categories with the id 90"),
    (lambda content: content["categories"][1].pop("name"), "category 3 in FILE has no name"),
    (lambda content: content["images"].clear(), "FILE has no images"),
    (lambda content: content["categories"].clear(), "FILE has no categories"),
    (lambda content: content.pop("annotations"), "FILE has no list of records called annotations"),
    (lambda content: content.update(images={}), "FILE has no list of records called images"),
    (lambda content: content.update(images=[1]), "FILE has no list of records called images"),
]


@pytest.mark.parametrize(("edit", "message"), FILE_MISTAKES)
def test_files_that_make_no_sense_are_refused(coco_folder: DrawCoco, edit: Edit, message: str) -> None:
    folder = coco_folder({"train2017": 3}, empty=0)
    change(folder, edit)
    expected = re.escape(message.replace("FILE", f"{folder}/{FILE}"))
    with pytest.raises(ValueError, match=rf"(?=.*{expected}).*: \w+"):
        opened(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\xfa", b'{"images": ['])
def test_what_is_no_json_is_refused(coco_folder: DrawCoco, content: bytes) -> None:
    folder = coco_folder()
    (folder / FILE).write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{folder}/{FILE} is not valid JSON .*: copy it again"):
        opened(folder)


def test_a_file_of_results_is_no_file_of_annotations(coco_folder: DrawCoco) -> None:
    folder = coco_folder()
    (folder / FILE).write_text("[]")
    with pytest.raises(ValueError, match=rf"^{folder}/{FILE} holds no COCO annotations"):
        opened(folder)


def test_images_that_are_missing_are_named(coco_folder: DrawCoco) -> None:
    folder = coco_folder()
    (folder / "train2017" / "0003.png").unlink()
    (folder / "train2017" / "0005.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"^2 of 8 images of .* such as 0003.png \(image id 19\): name"):
        opened(folder)


def test_images_may_lie_in_subfolders(coco_folder: DrawCoco) -> None:
    folder = coco_folder()
    (folder / "train2017" / "deep" / "er").mkdir(parents=True)
    (folder / "train2017" / "0000.png").rename(folder / "train2017" / "deep" / "er" / "0000.png")
    change(folder, lambda content: content["images"][-1].update(file_name="deep/er/0000.png"))
    source = opened(folder)
    assert source.read_image(0).size == (96, 64)
    change(folder, lambda content: content["images"][-1].update(file_name="nowhere/0000.png"))
    with pytest.raises(FileNotFoundError, match=r"1 of 8 images .* nowhere/0000.png"):
        opened(folder)


def test_a_split_that_does_not_exist_is_refused_with_those_that_do(coco_folder: DrawCoco) -> None:
    folder = coco_folder()
    with pytest.raises(FileNotFoundError, match=r"instances_test\.json \(the splits are train2017, val2017\): check"):
        opened(folder, training=False, eval_split="test")
    (folder / "annotations" / "instances_test.json").touch()
    with pytest.raises(FileNotFoundError, match=r"/test \(the splits are test, train2017, val2017\): check"):
        opened(folder, training=False, eval_split="test")


def test_annotations_nested_without_end_are_refused(coco_folder: DrawCoco) -> None:
    folder = coco_folder()
    (folder / FILE).write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        opened(folder)


def test_a_pipe_in_place_of_an_image_is_not_waited_for(coco_folder: DrawCoco) -> None:
    folder = coco_folder()
    source = opened(folder)
    file = folder / "train2017" / source.images[0]["file_name"]
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ValueError, match=r"cannot be used \(it is a named pipe, not a regular file\): copy it"):
        source.read_image(0)


@pytest.mark.parametrize("part", ["train", "eval"])
def test_the_option_to_check_is_named(coco_folder: DrawCoco, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = coco_folder()
    split = {"train": "train2017", "eval": "val2017"}[part]
    with pytest.raises(FileNotFoundError, match=rf"no file .* --data.{part}_split, .* --data.{part}_annotations$"):
        opened(folder, part == "train", **{f"{part}_split": "other"})
    with pytest.raises(FileNotFoundError, match=rf"no folder .*nowhere: .* --data.{part}_folder$"):
        opened(folder, part == "train", **{f"{part}_folder": "nowhere"})
    file = (folder / "annotations" / f"instances_{split}.json").rename(folder / "mine.json")
    images = (folder / split).rename(folder / "pictures")
    elsewhere = {f"{part}_annotations": str(file), f"{part}_folder": str(images)}
    source = opened(Path("nowhere"), part == "train", **elsewhere)
    assert (source.file, source.folder) == (file, images)
    monkeypatch.setenv("HOME", str(folder))
    assert opened(Path("nowhere"), part == "train", **elsewhere | {f"{part}_folder": "~/pictures"}).folder == images


def replace_image(source: CocoSource, image: Image.Image, **options: Any) -> None:
    image.save(source.folder / source.images[0]["file_name"], **options)


def test_images_lie_as_their_record_says(coco_folder: DrawCoco) -> None:
    """The first record says 96 × 64."""
    source = opened(coco_folder(ending=".jpg"))
    quarter = Image.Exif()
    # To be seen turned by a quarter.
    quarter[0x0112] = 6
    half_red = np.zeros((64, 96, 3), np.uint8)
    half_red[:, :48, 0] = 255
    replace_image(source, Image.fromarray(half_red), exif=quarter, quality=95)
    as_stored = np.array(source.read_image(0))
    assert as_stored.shape == (64, 96, 3)
    assert as_stored[32, 10, 0] > 200 > 50 > as_stored[32, 86, 0]
    # Stored decode_image, with its red half above: seen lying, its red half is on the right.
    replace_image(source, Image.fromarray(half_red.transpose(1, 0, 2).copy()), exif=quarter, quality=95)
    turned = np.array(source.read_image(0))
    assert turned.shape == (64, 96, 3)
    assert turned[32, 86, 0] > 200 > 50 > turned[32, 10, 0]
    replace_image(source, Image.new("RGB", (64, 96)))
    with pytest.raises(
        ValueError, match=r"0000.jpg \(image id 10\) .*64 × 96 pixels, but 96 × 64 by its record.*: copy"
    ):
        source.read_image(0)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "I;16"])
def test_colours_become_rgb(coco_folder: DrawCoco, mode: str) -> None:
    source = opened(coco_folder())
    replace_image(source, Image.new(mode, (96, 64)))
    image = source.read_image(0)
    assert (image.mode, image.size) == ("RGB", (96, 64))


@pytest.mark.parametrize("ending", [".png", ".jpg"])
@pytest.mark.parametrize("damage", ["cut", "text", "empty", "gone"])
def test_broken_images_are_named(coco_folder: DrawCoco, ending: str, damage: str) -> None:
    source = opened(coco_folder(ending=ending))
    file = source.folder / f"0000{ending}"
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes({"cut": content[: len(content) // 2], "text": b"this is no image", "empty": b""}[damage])
    with pytest.raises(
        ValueError, match=rf"^{file} \(image id 10\) cannot be used .*: copy it again, or take it out of"
    ):
        source.read_image(0)


@given(arrays(np.uint8, st.tuples(st.integers(1, 40), st.integers(1, 40)), elements=st.integers(0, 1)))
@settings(max_examples=50, deadline=None)
def test_compressed_runs_are_read_as_pycocotools_writes_them(mask: Any) -> None:
    code = coco_masks.encode(np.asfortranarray(mask))
    runs = _run_lengths(code["counts"].decode())
    assert np.repeat(np.arange(len(runs)) % 2, runs).tolist() == mask.flatten(order="F").tolist()


def test_lists_are_packed_and_come_back() -> None:
    lists: list[list[Any]] = [[1, "two"], [], [{"three": [3.5]}]]
    packed = PackedLists(iter(lists))
    assert [packed[index] for index in range(3)] == lists


def test_opening_looks_into_a_folder_once(coco_folder: DrawCoco, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = coco_folder({"train2017": 20})
    looked, list_folder = [], os.listdir
    monkeypatch.setattr(os, "listdir", lambda place: looked.append(place) or list_folder(place))
    opened(folder)
    assert len(looked) == 1
