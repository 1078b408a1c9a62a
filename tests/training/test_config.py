"""What a training run can be told."""

from inlinevit.training.config import SplitDataOptions


def test_what_is_said_of_the_data() -> None:
    assert SplitDataOptions().said() == {}
    assert SplitDataOptions(eval_split="val", workers=0).said() == {"eval_split": "val", "workers": 0}
    assert SplitDataOptions(eval_images="all").said() == {"eval_images": None}
    assert SplitDataOptions(eval_images=3).said() == {"eval_images": 3}
