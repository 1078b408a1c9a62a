"""Configuration that detection and segmentation share."""

from inlinevit.tasks.backbone_config import SplitDataOptions


def test_overrides_of_the_data() -> None:
    assert SplitDataOptions().overrides() == {}
    assert SplitDataOptions(eval_split="val", workers=0).overrides() == {"eval_split": "val", "workers": 0}
    assert SplitDataOptions(max_eval_samples="all").overrides() == {"max_eval_samples": None}
    assert SplitDataOptions(max_eval_samples=3).overrides() == {"max_eval_samples": 3}
