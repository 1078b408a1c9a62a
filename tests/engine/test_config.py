"""What a training run can be told."""

from inlinevit.engine.config import SplitDataOptions


def test_what_is_said_of_the_data() -> None:
    assert SplitDataOptions().said() == {}
    assert SplitDataOptions(eval_split="val", workers=0).said() == {"eval_split": "val", "workers": 0}
    assert SplitDataOptions(max_eval_samples="all").said() == {"max_eval_samples": None}
    assert SplitDataOptions(max_eval_samples=3).said() == {"max_eval_samples": 3}
