"""`inlinevit.stream` of images: paths, readers, arrays."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import inlinevit
from inlinevit.data.array_regions import ArrayRegions

VALUES = np.random.default_rng(0).integers(0, 256, (70, 101, 3)).astype(np.uint8)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return timm.create_model("inline_deit_tiny", embed_dim=32, depth=2, num_heads=2, img_size=64, num_classes=7).eval()


def normalised(model: Any, values: Any) -> torch.Tensor:
    mean, std = (torch.tensor(model.pretrained_cfg[name]).view(-1, 1, 1) for name in ("mean", "std"))
    return ((torch.from_numpy(values).permute(2, 0, 1) / 255 - mean) / std)[None]


@pytest.mark.parametrize("given", ["path", "str", "array", "tensor", "pil", "reader", "normalised"])
def test_images_of_every_kind(given: str, model: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(VALUES).save(path)
    image: Any = {
        "path": path,
        "str": str(path),
        "array": VALUES,
        "tensor": torch.from_numpy(VALUES).permute(2, 0, 1),
        "pil": Image.fromarray(VALUES),
        "reader": ArrayRegions(VALUES),
        "normalised": normalised(model, VALUES),
    }[given]
    with torch.no_grad():
        expected = model(normalised(model, VALUES))
    assert torch.allclose(inlinevit.stream(model, image), expected, atol=1e-5)


def test_regions_masks_and_files(model: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "mask.npy", np.ones((7, 10)))
    logits = inlinevit.stream(
        model,
        VALUES,
        region=(5, 6, 64, 48),
        mask=tmp_path / "mask.npy",
        features={"norm": tmp_path / "features.npy"},
        bands=[2, 1, 0],
    )
    part = normalised(model, np.ascontiguousarray(VALUES[6:54, 5:69, ::-1]))
    with torch.no_grad():
        assert torch.allclose(logits, model(part), atol=1e-5)
        tokens = model.forward_features(part)[0, 1:].view(3, 4, 32)
    assert np.allclose(np.load(tmp_path / "features.npy"), tokens, atol=1e-5)


def test_what_is_refused(model: Any) -> None:
    tensor = normalised(model, VALUES)
    with pytest.raises(ValueError, match="level do not apply to normalised pixels"):
        inlinevit.stream(model, tensor, level=0)
    with pytest.raises(ValueError, match="mask is a path, which needs an image"):
        inlinevit.stream(model, tensor, mask="mask.png")
    with pytest.raises(ValueError, match="it has no level 1"):
        inlinevit.stream(model, VALUES, level=1)
    with pytest.raises(TypeError, match="of type list"):
        inlinevit.stream(model, [VALUES])  # type: ignore[arg-type]
