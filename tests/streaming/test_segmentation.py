"""Streamed segmentation models give the logits of the plain forward pass."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import segmentation_models_pytorch as smp
import torch
import torch.nn.functional as F
from torch import nn

import inlinevit
from inlinevit.streaming import TensorSink
from inlinevit.streaming.moments import AdaptiveAverages, GroupMoments
from inlinevit.streaming.plan import OVERHEAD
from inlinevit.streaming.row_maps import StoredRows, TensorRows, bilinear
from inlinevit.tasks.segmentation.model import semantic_fpn, upernet
from tests.streaming.models import make_image, spill_always
from tests.streaming.test_resume import Interrupted, interrupt_at
from tests.streaming.test_stream import CountedSource, relative_error

BACKBONES: dict[str, tuple[str, dict[str, Any]]] = {
    "pvt": (
        "inline_pvt_tiny",
        {"embed_dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2), "mlp_ratios": (1, 1, 1, 1)},
    ),
    "swin": ("inline_swin_tiny", {"embed_dim": 12, "depths": (2, 1, 1, 1), "num_heads": (3, 3, 3, 3)}),
}
DECODERS = {"semantic_fpn": semantic_fpn, "upernet": upernet}


def make_segmenter(decoder: str = "semantic_fpn", backbone: str = "pvt", **options: Any) -> Any:
    """Return a model whose norms and convolutions matter."""
    torch.manual_seed(0)
    name, kwargs = BACKBONES[backbone]
    model = DECODERS[decoder](name, 5, **{"kwargs": kwargs, "channels": 64, **options}).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=1.5 * parameter[0].numel() ** -0.5)
        else:
            nn.init.normal_(parameter, mean=0.5, std=0.2)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model


def check(model: nn.Module, image: torch.Tensor, *chunk_rows: int | None) -> None:
    with torch.no_grad():
        expected = model(image)
    for rows in chunk_rows:
        out = inlinevit.stream(model, image, chunk_rows=rows)
        assert out.shape == expected.shape
        assert relative_error(out, expected) < 1e-5
        assert float((out - expected).abs().max() / expected.abs().max()) < 1e-4


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("size", [(97, 131), (64, 330)])
def test_logits_are_those_of_the_plain_forward_pass(decoder, backbone, size):
    check(make_segmenter(decoder, backbone), make_image(*size), None, 3)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("size", [(1, 1), (3, 200), (70, 33)])
def test_images_smaller_than_the_padding(decoder, size):
    check(make_segmenter(decoder), make_image(*size), 1)


@pytest.mark.slow
@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("size", [(97, 131), (330, 64), (500, 611)])
def test_any_chunk_and_size(decoder, backbone, size):
    check(make_segmenter(decoder, backbone), make_image(*size), None, 1, 2, 5, 16, 1000)


def test_levels_that_are_concatenated():
    model = make_segmenter()
    model.decoder.merge.policy = "cat"
    model.segmentation_head[0] = nn.Conv2d(4 * 32, 5, 3, padding=1)
    check(model, make_image(97, 131), 3)


def test_models_that_are_optimized_for_inference():
    model, image = make_segmenter(), make_image(97, 131)
    optimized = inlinevit.optimize_for_inference(model, compile=False)
    with torch.no_grad():
        assert relative_error(inlinevit.stream(optimized, image, chunk_rows=4), model(image)) < 1e-5


@pytest.mark.parametrize("decoder", DECODERS)
def test_spilled_results_are_the_same(decoder, tmp_path, monkeypatch):
    model, image = make_segmenter(decoder), make_image(97, 131)
    in_memory = inlinevit.stream(model, image, chunk_rows=4)
    spill_always(monkeypatch)
    assert torch.equal(inlinevit.stream(model, image, spill=tmp_path, chunk_rows=4), in_memory)
    assert list(tmp_path.iterdir()) == []


def test_rows_are_read_once_and_go_to_a_sink():
    model, image = make_segmenter(), make_image(97, 131)
    source, logits, stage = CountedSource(image), TensorSink(), TensorSink()
    fractions: list[float] = []
    out = inlinevit.stream(
        model, source, features={"logits": logits, "stages.1": stage}, chunk_rows=5, progress=fractions.append
    )
    assert source.read == list(range(97))
    assert out.shape == (1, 5, 0, 0)
    with torch.no_grad():
        expected = model(image)[0].permute(1, 2, 0)
        features = model.encoder.model(F.pad(image, (0, 29, 0, 31)))[1]
    assert logits.stride == 1
    assert relative_error(logits.map, expected) < 1e-5
    assert relative_error(stage.map, features[0].permute(1, 2, 0)) < 1e-5
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1
    # The parts of the work add up: the last step is no jump.
    assert fractions[-2] > 0.99


@pytest.mark.parametrize("decoder", DECODERS)
def test_an_interrupted_run_continues_with_the_same_result(decoder, tmp_path):
    model, image, state = make_segmenter(decoder), make_image(97, 131), tmp_path / "state"
    expected = inlinevit.stream(model, image, chunk_rows=7)
    seen = set()
    for fraction in (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97, 0.999):
        with pytest.raises(Interrupted):
            inlinevit.stream(model, image, chunk_rows=7, resume=state, progress=interrupt_at(fraction))
        manifest = json.loads((state / "stream.json").read_text()) if (state / "stream.json").exists() else {}
        seen.add((manifest.get("stage"), manifest.get("passes"), len(manifest.get("gathered", ()))))
    # Interrupted within the backbone, and within the decoder.
    assert {steps > 0 for _, _, steps in seen} == {False, True}
    assert torch.equal(inlinevit.stream(model, image, chunk_rows=7, resume=state), expected)
    assert not state.exists()


def test_the_state_of_another_decoder_is_refused(tmp_path):
    model, image = make_segmenter(), make_image(64, 64)
    with pytest.raises(Interrupted):
        inlinevit.stream(model, image, resume=tmp_path / "state", progress=interrupt_at(0.7))
    with torch.no_grad():
        model.segmentation_head[0].bias += 1
    with pytest.raises(ValueError, match="has the state of another image, model or mask"):
        inlinevit.stream(model, image, resume=tmp_path / "state")


def test_a_lost_map_is_reported(tmp_path):
    model, image, state = make_segmenter("upernet"), make_image(64, 64), tmp_path / "state"
    with pytest.raises(Interrupted):
        inlinevit.stream(model, image, resume=state, progress=interrupt_at(0.9))
    (state / "map-c2.bin").unlink()
    with pytest.raises(ValueError, match=r"map-c2\.bin is missing: remove .*, and start again"):
        inlinevit.stream(model, image, resume=state)


def test_the_plan_counts_maps_chunks_and_the_result(tmp_path):
    model, image = make_segmenter("upernet"), make_image(64, 64)
    with pytest.raises(ValueError, match=r"too small .*: allow at least \d+ MB, or \d+ MB and a folder"):
        inlinevit.stream(model, image, memory="1MB")
    with pytest.raises(ValueError, match=r"too small .*: allow at least \d+ MB$"):
        inlinevit.stream(model, image, memory="1MB", spill=tmp_path)


def replace_decoder(model: Any) -> None:
    model.decoder = smp.decoders.unet.decoder.UnetDecoder([3, 0, 8, 16, 24, 32], [16, 16, 16, 16, 16], 5)


def replace_norm(model: Any) -> None:
    model.decoder.fusion_block[1] = nn.InstanceNorm2d(64)


def replace_fpn_norm(model: Any) -> None:
    model.decoder.seg_blocks[0].block[1].block[1] = nn.BatchNorm2d(32)


def forget_statistics(model: Any) -> None:
    model.decoder.psp.out_conv[1] = nn.BatchNorm2d(64, track_running_stats=False)


def replace_conv(model: Any) -> None:
    model.decoder.fpn_conv_blocks[0][0] = nn.Conv2d(64, 64, 3, padding=2, dilation=2)


def replace_interpolation(model: Any) -> None:
    model.decoder.p3.interpolation_mode = "bilinear"


def add_activation(model: Any) -> None:
    model.segmentation_head[2] = nn.Softmax(dim=1)


def replace_upsampling(model: Any) -> None:
    model.segmentation_head[1] = nn.Upsample(scale_factor=4, mode="bicubic")


def replace_pooling(model: Any) -> None:
    model.decoder.psp.blocks[1][0] = nn.AdaptiveMaxPool2d(2)


@pytest.mark.parametrize(
    ("decoder", "change", "message"),
    [
        ("semantic_fpn", replace_decoder, "the decoder UnetDecoder cannot be streamed"),
        ("upernet", replace_norm, "InstanceNorm2d of the decoder cannot be streamed"),
        ("upernet", forget_statistics, "BatchNorm2d of the decoder's pyramid pooling cannot be streamed"),
        ("upernet", replace_conv, r"the convolution Conv2d\(.*dilation.* of the decoder cannot be streamed"),
        ("upernet", replace_pooling, "pyramid pooling by AdaptiveMaxPool2d cannot be streamed"),
        ("semantic_fpn", replace_fpn_norm, "the decoder's layers Conv2d, BatchNorm2d, ReLU cannot be streamed"),
        ("semantic_fpn", replace_interpolation, "bilinear interpolation between levels cannot be streamed"),
        ("semantic_fpn", add_activation, "Softmax of the head cannot be streamed"),
        ("semantic_fpn", replace_upsampling, "the bicubic upsampling of the head cannot be streamed"),
        ("semantic_fpn", lambda model: model.train(), "the model is in training mode"),
        ("semantic_fpn", lambda model: model.decoder.half(), "streaming computes in float32"),
        ("upernet", lambda model: model.decoder.psp.register_forward_hook(print), "have hooks"),
    ],
)
def test_other_parts_are_refused_before_anything_is_read(decoder, change, message):
    model, source = make_segmenter(decoder), CountedSource(make_image(64, 64))
    change(model)
    if message != "the model is in training mode":
        model.eval()
    with pytest.raises(ValueError, match=message) as caught:
        inlinevit.stream(model, source)
    assert "\n" not in str(caught.value)
    assert source.read == []


def test_other_models_and_options_are_refused():
    image = make_image(64, 64)
    name, kwargs = BACKBONES["pvt"]
    other = smp.FPN(f"tu-{name}", encoder_weights=None, classes=5, **kwargs).eval()
    with pytest.raises(ValueError, match=r"FPN cannot be streamed: use a classification model .* or a segmentation"):
        inlinevit.stream(other, image)
    convnext = semantic_fpn("test_convnext", 5, channels=64).eval()
    with pytest.raises(ValueError, match=r"the backbone .* cannot be streamed: use a segmentation model on one of inl"):
        inlinevit.stream(convnext, image)
    with pytest.raises(ValueError, match="mask has 63 × 64 entries: it should have those of the image, 64 × 64, or of"):
        inlinevit.stream(make_segmenter(), image, mask=torch.ones(63, 64, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"the model has no map 'norm': choose from .*, logits"):
        inlinevit.stream(make_segmenter(), image, features={"norm": TensorSink()})
    with pytest.raises(ValueError, match="give a normalised tensor, or the predictor"):
        inlinevit.stream(make_segmenter(), image[0])
    with pytest.raises(ValueError, match=r"expected images of shape \(batch, 3, height, width\)"):
        inlinevit.stream(make_segmenter(), torch.cat([image, image[:, :1]], dim=1))


@pytest.mark.parametrize("decoder", DECODERS)
def test_masked_pixels_have_no_influence(decoder):
    model, image = make_segmenter(decoder), make_image(97, 131)
    everything = torch.ones(97, 131, dtype=torch.bool)
    with torch.no_grad():
        expected = model(image)
    for mask in (everything, everything[::4, ::4]):
        assert relative_error(inlinevit.stream(model, image, mask=mask, chunk_rows=5), expected) < 1e-5
    mask, other = everything.clone(), image.clone()
    mask[40:, :] = mask[:, 76:] = False
    # Tokens of 4 × 4 pixels are real if one of their pixels is.
    other[:, :, 40:], other[..., 76:] = 7.0, -3.0
    masked = inlinevit.stream(model, image, mask=mask, chunk_rows=5)
    assert torch.equal(inlinevit.stream(model, other, mask=mask, chunk_rows=5), masked)
    assert relative_error(inlinevit.stream(model, other, mask=mask, chunk_rows=64), masked) < 1e-5
    assert relative_error(masked, expected) > 1e-3


def test_statistics_and_averages_of_real_tokens():
    torch.manual_seed(0)
    mask = torch.rand(9, 8) > 0.4
    rows = torch.where(mask.unsqueeze(2), torch.randn(9, 8, 4) + 3, 0.0)
    moments, averages = GroupMoments(nn.GroupNorm(2, 4)), AdaptiveAverages((9, 8, 4), [1, 3])
    for top in range(0, 9, 2):
        for gather in (moments, averages):
            gather.add(top, rows[top : top + 2], mask[top : top + 2])
    real = rows[mask].double().view(-1, 2, 2)
    assert torch.allclose(moments.mean, real.mean(dim=(0, 2)))
    assert torch.allclose(moments.squares / moments.count, real.var(dim=(0, 2), correction=0))
    whole, thirds = averages.finish()
    assert torch.allclose(whole[0, 0], rows[mask].mean(dim=0))
    assert torch.allclose(thirds[1, 2], rows[3:6, 5:8][mask[3:6, 5:8]].mean(dim=0))


def test_statistics_of_groups_are_exact():
    torch.manual_seed(0)
    norm = nn.GroupNorm(4, 8)
    # Far from zero, where sums of squares would lose everything in float32.
    rows = torch.randn(50, 20, 8) + torch.linspace(-1000, 3000, 8)
    rows[:25] += 10
    moments = GroupMoments(norm)
    for top in range(0, 50, 7):
        moments.add(top, rows[top : top + 7])
    scale, shift = moments.finish()
    exact = nn.GroupNorm(4, 8).double()(rows.double().permute(2, 0, 1)[None])[0].permute(1, 2, 0)
    assert torch.allclose((rows.double() * scale + shift), exact, atol=1e-3)
    grouped = rows.double().view(-1, 4, 2)
    assert torch.allclose(moments.mean, grouped.mean(dim=(0, 2)), rtol=1e-12)
    assert torch.allclose(moments.squares / moments.count, grouped.var(dim=(0, 2), correction=0), rtol=1e-12)


@pytest.mark.parametrize("size", [(2, 2), (13, 7), (5, 40)])
def test_averages_are_those_of_adaptive_pooling(size):
    torch.manual_seed(0)
    rows, sizes = torch.randn(*size, 3), [1, 2, 3, 6]
    averages = AdaptiveAverages((*size, 3), sizes)
    for top in range(0, size[0], 4):
        averages.add(top, rows[top : top + 4])
    for side, found in zip(sizes, averages.finish(), strict=True):
        expected = F.adaptive_avg_pool2d(rows.permute(2, 0, 1), side).permute(1, 2, 0)
        assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize(("old", "new"), [(1, 7), (2, 3), (40, 13), (33, 66), (12289, 49156), (6, 1000)])
def test_interpolation_has_the_weights_of_torch(old, new, align_corners):
    torch.manual_seed(0)
    rows = torch.randn(old, 2, 1)
    expected = F.interpolate(rows.permute(2, 0, 1)[None], (new, 3), mode="bilinear", align_corners=align_corners)[0]
    resized = bilinear(TensorRows(rows), (new, 3), align_corners=align_corners)
    reader = resized.open()
    parts = [reader.read((top, min(top + 11, new)), top + 11) for top in range(0, new, 11)]
    # Weights in float64 would differ by more, in thousands of rows.
    assert torch.allclose(torch.cat(parts), expected.permute(1, 2, 0), atol=1e-6)


def test_the_map_itself_is_returned_if_nothing_is_resized():
    rows = StoredRows((4, 5, 6))
    assert bilinear(rows, (4, 5), align_corners=True) is rows


# Streams an image with a budget; prints by how many bytes the peak of memory grew.
CHILD = """
import sys, torch, inlinevit
from inlinevit.streaming import TensorSink
from tests.streaming.test_segmentation import make_segmenter
torch.set_num_threads(1)
class Source:
    channels = 3
    def __init__(self, width, height):
        self.size = (width, height)
    def rows(self, top, bottom):
        return torch.ones(3, bottom - top, self.size[0])
class Drop(TensorSink):
    def begin(self, shape, stride):
        pass
    def write_rows(self, top, rows):
        rows.argmax(dim=2)
def memory(field):
    with open("/proc/self/status") as status:
        return 1024 * int(next(line for line in status if line.startswith(field)).split()[1])
decoder, budget, spill = sys.argv[1:]
model = make_segmenter(decoder, channels=128)
inlinevit.stream(model, Source(64, 64))
with open("/proc/self/clear_refs", "w") as peak:
    peak.write("5")
before = memory("VmRSS")
inlinevit.stream(model, Source(2048, 1536), memory=budget, spill=spill, features={"logits": Drop()})
print(memory("VmHWM") - before)
"""


# The maps of SemanticFPN take 91 MB: with the larger budget they are in memory, with the smaller one in files.
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is measured on Linux")
@pytest.mark.parametrize(
    ("decoder", "budget"),
    [("semantic_fpn", 240), ("semantic_fpn", 120), ("semantic_fpn", 80), ("upernet", 240), ("upernet", 120)],
)
def test_the_peak_of_memory_stays_within_the_budget(decoder, budget, tmp_path):
    command = [sys.executable, "-c", CHILD, decoder, f"{budget}MB", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    print(f"{decoder} {budget} MB: {int(result.stdout) / 1e6:.0f} MB")
    assert int(result.stdout) < budget * 10**6 + OVERHEAD
    assert list(tmp_path.iterdir()) == []
