"""Our models answer what the reference implementation answers, through the real loader."""

import numpy as np
import pytest
import timm
import torch

import inlinevit
from tests import GOLDEN, slow_except

LOGITS = np.load(GOLDEN / "logits.npz")


# The larger Swin has the blocks of the small one.
@pytest.mark.parametrize("name", slow_except(LOGITS.files, *(set(LOGITS.files) - {"inline_swin_base"})))
def test_logits_equal_those_of_the_reference(name, published_weights, tmp_path):
    path = tmp_path / f"{name}.pth"
    torch.save({"model": published_weights(name)}, path)
    model = timm.create_model(name).eval()
    inlinevit.load_checkpoint(model, path)
    size = model.pretrained_cfg["input_size"]
    image = np.random.RandomState(0).standard_normal((1, *size)).astype(np.float32)
    with torch.no_grad():
        logits = model(torch.from_numpy(image))[0].numpy()
    # What float32 leaves: 2e-6 to 4e-6 were seen.
    np.testing.assert_allclose(logits, LOGITS[name], rtol=0, atol=2e-5)
