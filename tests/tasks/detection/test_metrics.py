"""From a detector's answer to COCO's results and numbers: the same as pycocotools', to the last digit."""

import contextlib
import copy
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pycocotools import mask as coco_masks
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import paste_masks_in_image

from inlinevit.tasks.detection.coco import Category
from inlinevit.tasks.detection.metrics import (
    NUMBERS,
    coco_metrics,
    count_matches,
    detect,
    read_results,
    results_of,
    to_results,
)

CATEGORIES = [Category(3, "disc"), Category(7, "square"), Category(90, "triangle")]
SIZE = (40, 60)


def make_answer(count: int = 7) -> dict[str, Tensor]:
    """An answer whose boxes reach beyond the image here and there."""
    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(count, 2, generator=generator) * torch.tensor([60.0, 40.0]) - 3
    return {
        "boxes": torch.cat([corners, corners + 4 + 20 * torch.rand(count, 2, generator=generator)], dim=1),
        "labels": torch.randint(1, 4, (count,), generator=generator),
        "scores": torch.rand(count, generator=generator),
        "masks": torch.rand(count, 1, 28, 28, generator=generator),
    }


def test_an_answer_in_cocos_format() -> None:
    answer = make_answer(50)
    found = json.loads(json.dumps(to_results(answer, 42, SIZE, CATEGORIES)))
    assert [one["category_id"] for one in found] == [CATEGORIES[label - 1].id for label in answer["labels"]]
    assert {one["image_id"] for one in found} == {42}
    assert torch.equal(torch.tensor([one["score"] for one in found]), answer["scores"])
    boxes = torch.tensor([one["bbox"] for one in found], dtype=torch.float64)
    torch.testing.assert_close(boxes[:, :2] + boxes[:, 2:], answer["boxes"][:, 2:].double(), rtol=1e-15, atol=1e-14)
    masks = torch.from_numpy(coco_masks.decode([one["segmentation"] for one in found])).permute(2, 0, 1)
    expected = paste_masks_in_image(answer["masks"], answer["boxes"], SIZE)[:, 0] > 0.5
    assert torch.equal(masks.bool(), expected)
    assert 0 < masks.sum() < masks.numel()


def test_an_answer_without_objects() -> None:
    assert to_results(make_answer(0), 42, SIZE, CATEGORIES) == []


def test_a_head_that_is_wider_than_there_are_categories() -> None:
    answer = make_answer()
    found = to_results(answer, 42, SIZE, CATEGORIES[:2])
    assert len(found) == (answer["labels"] <= 2).sum() < 7


class Pasting(nn.Module):
    """Tells what it was given and asked for."""

    def forward(self, images: list[Tensor], paste_masks: bool = True) -> list[dict[str, Any]]:
        (image,) = images
        return [{"image": image, "paste_masks": paste_masks}]


def test_masks_are_asked_for_small() -> None:
    answer = detect(Pasting(), torch.full((3, 4, 5), 51, dtype=torch.uint8))
    assert answer["paste_masks"] is False
    assert torch.equal(answer["image"], torch.full((3, 4, 5), 0.2))


@pytest.fixture(scope="module")
def truth_file(draw_coco: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Annotations with crowds, images without objects, and ids that have gaps."""
    folder = draw_coco(tmp_path_factory.mktemp("coco"), {"val2017": 24}, objects=6, empty=3, crowds=8)
    return folder / "annotations" / "instances_val2017.json"


@pytest.fixture
def truth(truth_file: Path) -> dict[str, Any]:
    return json.loads(truth_file.read_text())


def to_rle(annotation: dict[str, Any], truth: dict[str, Any]) -> dict[str, Any]:
    coco = COCO()
    coco.imgs = {record["id"]: record for record in truth["images"]}
    return coco.annToRLE(annotation)


def perfect_results(truth: dict[str, Any]) -> list[dict[str, Any]]:
    results = []
    for annotation in truth["annotations"]:
        if not annotation["iscrowd"]:
            rle = to_rle(annotation, truth)
            counts = rle["counts"]
            mask = {"size": rle["size"], "counts": counts if isinstance(counts, str) else counts.decode()}
            kept = {key: annotation[key] for key in ("image_id", "category_id", "bbox")}
            results.append({**kept, "score": 0.9, "segmentation": mask})
    return results


def imperfect_results(truth: dict[str, Any]) -> list[dict[str, Any]]:
    """Objects moved and confused, some found twice, in crowds and where nothing is; scores with ties."""
    random = np.random.default_rng(0)
    sizes = {record["id"]: (record["height"], record["width"]) for record in truth["images"]}
    results = []
    for annotation in [*truth["annotations"], *truth["annotations"]]:
        if random.random() < 0.2:
            continue
        mask = np.roll(coco_masks.decode(to_rle(annotation, truth)), random.integers(-4, 5, 2), (0, 1))
        rle = coco_masks.encode(np.asfortranarray(mask))
        results.append(
            {
                "image_id": annotation["image_id"],
                "category_id": int(random.choice([annotation["category_id"], annotation["category_id"], 3])),
                "bbox": (np.array(annotation["bbox"]) + random.normal(0, 2, 4)).clip(0.1).tolist(),
                "score": float(round(random.random(), 1)),
                "segmentation": {"size": rle["size"], "counts": rle["counts"].decode()},
            }
        )
    for number, (height, width) in sizes.items():
        rle = coco_masks.encode(np.asfortranarray(np.ones((height, width), np.uint8)))
        mask = {"size": rle["size"], "counts": rle["counts"].decode()}
        whole = {"bbox": [0, 0, width, height], "segmentation": mask}
        results.append({"image_id": number, "category_id": 7, "score": 0.05, **whole})
    return results


def pycocotools_stats(truth_file: Path, results_file: Path, iou_type: str) -> list[float]:
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(truth_file))
        evaluation = COCOeval(truth, truth.loadRes(str(results_file)), iou_type)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats.tolist()


def test_numbers_are_those_of_pycocotools(
    truth_file: Path, truth: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = imperfect_results(truth)
    files = {"box": tmp_path / "boxes.json", "mask": tmp_path / "masks.json"}
    for part, file in files.items():
        file.write_text(json.dumps(results_of(part, results)))
    outcome = coco_metrics(truth, results)
    assert capsys.readouterr().out == ""
    for part, iou_type in (("box", "bbox"), ("mask", "segm")):
        ours, theirs = outcome.metrics[part], pycocotools_stats(truth_file, files[part], iou_type)
        assert list(ours) == list(NUMBERS)
        assert [-1.0 if math.isnan(value) else value for value in ours.values()] == theirs
        assert 0.1 < ours["AP"] < ours["AP50"] < 0.9
    # Boxes and masks in one file are the same, and so are those in two.
    both = tmp_path / "both.json"
    both.write_text(json.dumps(results))
    for several in ([str(both)], [str(file) for file in files.values()]):
        assert repr(coco_metrics(truth, read_results(several, truth))) == repr(outcome)
    assert outcome.images == 24
    assert outcome.numbers()["mask_AP75"] == outcome.metrics["mask"]["AP75"]


def test_sizes_of_masks_are_not_those_of_boxes(truth: dict[str, Any]) -> None:
    """A mask that is no object's is a mistake among the small ones, if it is small, however large its box is."""
    truth["annotations"] = truth["annotations"][:1]
    truth["annotations"][0]["area"] = 100.0
    (right,) = perfect_results(truth)
    height, width = right["segmentation"]["size"]
    corners = np.zeros((height, width), np.uint8, order="F")
    corners[0, 0] = corners[-1, -1] = 1
    rle = {"size": [height, width], "counts": coco_masks.encode(corners)["counts"].decode()}
    wrong = {**right, "score": 1.0, "bbox": [0, 0, width, height], "segmentation": rle}
    outcome = coco_metrics(truth, [wrong, right])
    assert outcome.metrics["mask"]["APs"] == pytest.approx(0.5)
    assert outcome.metrics["box"]["APs"] == pytest.approx(1)


def test_a_perfect_detector(truth: dict[str, Any]) -> None:
    outcome = coco_metrics(truth, perfect_results(truth))
    assert outcome.categories == CATEGORIES
    assert outcome.class_ap == {"box": pytest.approx([1.0] * 3), "mask": pytest.approx([1.0] * 3)}
    counts = [sum(a["category_id"] == c.id and not a["iscrowd"] for a in truth["annotations"]) for c in CATEGORIES]
    assert outcome.objects == counts
    assert outcome.numbers()["box_AP"] == outcome.numbers()["mask_AR100"] == pytest.approx(1)


def test_the_mean_over_categories_is_the_whole(truth: dict[str, Any]) -> None:
    outcome = coco_metrics(truth, imperfect_results(truth))
    for part in ("box", "mask"):
        by_category = outcome.class_ap[part]
        assert len(set(by_category)) == 3
        assert outcome.numbers()[f"{part}_AP"] == pytest.approx(sum(by_category) / 3, abs=1e-12)


def test_a_category_without_objects_has_no_number(truth: dict[str, Any]) -> None:
    truth["annotations"] = [one for one in truth["annotations"] if one["category_id"] != 7]
    outcome = coco_metrics(truth, perfect_results(truth))
    assert [math.isnan(value) for value in outcome.class_ap["box"]] == [False, True, False]
    assert outcome.numbers()["box_AP"] == pytest.approx(1)


def test_nothing_found(truth: dict[str, Any]) -> None:
    outcome = coco_metrics(truth, [])
    assert outcome.numbers()["box_AP"] == outcome.numbers()["mask_AP"] == 0
    assert outcome.class_ap["mask"] == [0.0] * 3


def test_nothing_to_find(truth: dict[str, Any]) -> None:
    found = imperfect_results(truth)
    truth["annotations"] = []
    for results in ([], found):
        numbers = coco_metrics(truth, results).numbers()
        assert len(numbers) == 24
        assert all(math.isnan(value) for value in numbers.values())


def test_boxes_alone(truth: dict[str, Any]) -> None:
    outcome = coco_metrics(truth, results_of("box", perfect_results(truth)))
    assert {row["mask_AP"] for row in outcome.per_class()} == {None}
    assert set(outcome.numbers()) == {f"box_{name}" for name in NUMBERS}


def test_what_is_given_stays_as_it_is(truth: dict[str, Any]) -> None:
    results = imperfect_results(truth)
    before = copy.deepcopy((truth, results))
    coco_metrics(truth, results)
    assert (truth, results) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_id": 11}, "result 0 of .* is for image 11, which the data do not have: evaluate it on"),
        ({"category_id": 1}, "is for category 1, which the data do not have"),
        ({"category_id": [3]}, r"is for category \[3\], which the data do not have"),
        ({"score": "high"}, "has the score 'high'"),
        ({"score": math.nan}, "has the score nan"),
        ({"bbox": [1, 2, 3]}, r"has the bbox \[1, 2, 3\]: it should be four numbers"),
        (
            {"bbox": [1, 2, -3, 4]},
            r"^result 0 of .*results\.json has the bbox \[1, 2, -3, 4\], whose width or height is",
        ),
        ({"segmentation": [[1, 2, 3, 4, 5, 6]]}, "not a compressed RLE"),
        ({"segmentation": {"size": [3, 3], "counts": "0"}}, "has a mask of the size"),
    ],
)
def test_results_that_do_not_fit_the_data_are_refused(
    change: dict[str, Any], message: str, truth: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps([{**perfect_results(truth)[0], **change}]))
    with pytest.raises(ValueError, match=message):
        read_results([str(file)], truth)


@pytest.mark.parametrize("content", ["", "{}", "[3]", '[{"image_id": 10, "category_id": 3, "score": 1}]'])
def test_files_that_hold_no_results_are_refused(content: str, truth: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(ValueError, match=r"results\.json (is|holds|lacks|has) no|lacks image_id|has neither bbox nor"):
        read_results([str(tmp_path / "results.json")], truth)
    with pytest.raises(FileNotFoundError, match="no file at"):
        read_results([str(tmp_path / "nothing.json")], truth)


def boxed(category: int, box: tuple[int, int, int, int], **fields: Any) -> dict[str, Any]:
    """An object with a box and the mask that fills it."""
    left, top, width, height = box
    mask = np.zeros((100, 100), np.uint8, order="F")
    mask[top : top + height, left : left + width] = 1
    return {"category_id": category, "bbox": list(box), "segmentation": coco_masks.encode(mask), **fields}


def test_matches_of_one_image() -> None:
    truth = [
        boxed(3, (0, 0, 10, 10)),
        boxed(3, (20, 0, 10, 10)),
        boxed(7, (0, 50, 10, 10)),
        boxed(90, (50, 50, 40, 40), iscrowd=1),
    ]
    results = [
        # Found; found again, which is wrong; found with an IoU of exactly a half; of less than a half.
        boxed(3, (0, 0, 10, 10), score=0.8),
        boxed(3, (1, 0, 10, 10), score=0.7),
        boxed(3, (20, 0, 10, 5), score=0.9),
        boxed(7, (0, 50, 10, 4), score=0.9),
        # Another category; in a crowd, which does not count; beside the crowd.
        boxed(90, (20, 0, 10, 10), score=0.5),
        boxed(90, (60, 60, 10, 10), score=0.5),
    ]
    masks = [{name: value for name, value in one.items() if name != "bbox"} for one in results]
    for found in (results, results[::-1], masks):
        assert count_matches(found, truth) == (2, 3, 1)
    assert count_matches([], truth) == (0, 0, 3)
    assert count_matches(results, []) == (0, 6, 0)
    assert count_matches([], []) == (0, 0, 0)
