"""A data set of noise, and studies that are trained on it in seconds."""

from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from inlinevit.experiments.reproduce import studies
from inlinevit.experiments.reproduce.design import Cell, Claim, Study

SMALL = {"patch_size": 8, "embed_dim": 8, "depth": 1, "num_heads": 1}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Ten classes: 8 images each to train on, one batch of 64 also if a tenth is held out, and 2 to test."""
    folder = tmp_path_factory.mktemp("cifar10")
    generator = np.random.default_rng(0)
    for part, count in (("train", 8), ("test", 2)):
        for label in range(10):
            (folder / part / f"class{label}").mkdir(parents=True)
            for place in range(count):
                image = Image.fromarray(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8))
                image.save(folder / part / f"class{label}" / f"{place}.png")
    return str(folder)


@pytest.fixture
def small_studies() -> Iterator[dict[str, Study]]:
    """Two studies of tiny models instead of the real ones, with a cell in common."""
    softmax = Cell("softmax", "softmax", SMALL)
    linear = Cell("linear", "linear", {"attention": "linear", **SMALL})
    inline = Cell("inline", "InLine", {"attention": "inline", "attn_kwargs": {"local_residual": False}, **SMALL})
    small = {
        "first": Study("First", "Which?", (softmax, linear), (Claim("softmax wins", softmax, linear),), 1),
        "second": Study("Second", "How?", (softmax, inline), (), other_seeds=2),
    }
    before = dict(studies.STUDIES)
    studies.STUDIES.clear()
    studies.STUDIES.update(small)
    yield small
    studies.STUDIES.clear()
    studies.STUDIES.update(before)
