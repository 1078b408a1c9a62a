"""Models that label pixels, out of training runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from inlinevit.tasks.segmentation.predictor import load_segmenter
from tests.tasks.segmentation.runs import make_run


@pytest.mark.parametrize("options", [{}, {"arch": "upernet"}])
def test_opening_a_run(options: dict[str, Any], tmp_path: Path) -> None:
    weights = make_run(tmp_path / "run", **options)
    segmenter = load_segmenter(str(tmp_path / "run"))
    torch.testing.assert_close(dict(segmenter.model.state_dict()), weights, rtol=0, atol=0)
    assert not segmenter.model.training
    assert [kind.name for kind in segmenter.labels.classes] == ["red", "green [b]", "blue"]
    assert segmenter.labels.to_values(torch.tensor([[0, 1, 2, 255]])).tolist() == [[7, 2, 9, 0]]
    assert segmenter.name == f"{options.get('arch', 'semantic_fpn')} on test_convnext"
    assert segmenter.config.inference.min_size == 48
    # Its own, not those of most backbones.
    assert segmenter.mean_std == ((0.5,) * 3, (0.5,) * 3)
