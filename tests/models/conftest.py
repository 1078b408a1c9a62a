"""The published parameters and weights for them, for all tests of the models."""

import gzip
import json
import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import GOLDEN

DATA = GOLDEN


@pytest.fixture(scope="session")
def parameters() -> dict[str, Any]:
    """For each InLine model: img_size, parameters (published name: shape), ignored_buffers."""
    return json.loads(gzip.decompress((DATA / "parameters.json.gz").read_bytes()))


@pytest.fixture(scope="session")
def published_weights(parameters: dict[str, Any]) -> Callable[[str], dict[str, Tensor]]:
    """`published_weights(name)`: the weights for which golden logits are known, under published names."""

    def weights(name: str) -> dict[str, Tensor]:
        return {key: _golden_weight(key, shape) for key, shape in parameters[name]["parameters"].items()}

    return weights


def _golden_weight(name: str, shape: list[int]) -> Tensor:
    z = torch.from_numpy(np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32))
    if len(shape) == 1:
        return 1 + 0.1 * z if name.endswith(".weight") else 0.1 * z
    if (len(shape) == 3 and shape[0] == 1) or name.endswith("relative_position_bias_table"):
        return 0.2 * z
    return z / math.sqrt(math.prod(shape[1:]))
