"""Streamed results are those of the plain forward pass."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import inlinevit
from inlinevit.streaming import HeadSink, TensorSink, blocks
from inlinevit.streaming import stream as stream_source
from tests.streaming.models import FAMILIES, MODELS, make_image, make_model, spill_always


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


def check(model: nn.Module, image: torch.Tensor, *chunk_rows: int | None) -> None:
    with torch.no_grad():
        expected = model(image)
    for rows in chunk_rows:
        out = inlinevit.stream(model, image, chunk_rows=rows)
        assert out.shape == expected.shape
        assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize("kind", MODELS)
def test_stream_equals_the_plain_forward_pass(kind):
    check(make_model(kind), make_image(70, 203), 3)


@pytest.mark.parametrize("kind", [*FAMILIES, "inline windows", "softmax windows"])
def test_without_native_kernels(kind, monkeypatch):
    monkeypatch.setattr(blocks, "pack_block", lambda block, *, int8: None)
    check(make_model(kind), make_image(70, 203), 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("size", [(150, 203), (61, 300), (200, 33)])
def test_any_chunk_and_size(kind, size, monkeypatch):
    model, image = make_model(kind), make_image(*size)
    check(model, image, None, 1, 3, 5)
    monkeypatch.setattr(blocks, "pack_block", lambda block, *, int8: None)
    check(model, image, None, 1, 3, 5)


def test_an_odd_size_of_many_tokens():
    check(make_model("deit"), make_image(1000, 3000), None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pvt", "swin", "cswin"])
def test_an_odd_size_of_many_tokens_in_all_families(kind):
    check(make_model(kind), make_image(1000, 3000), None)


@pytest.mark.parametrize("kind", FAMILIES)
def test_maps_of_stages_and_blocks(kind):
    model, image = make_model(kind), make_image(70, 133)
    with torch.no_grad():
        features, expected = model.forward_intermediates(image)
        logits = model(image)
    names = [info["module"] for info in model.feature_info]
    sinks = {name: TensorSink() for name in [*names, "norm"]}
    out = inlinevit.stream(model, image, features=sinks, chunk_rows=2)
    assert relative_error(out, logits) < 1e-5
    for name, level, info in zip(names, expected, model.feature_info, strict=True):
        assert sinks[name].stride == info["reduction"]
        assert relative_error(sinks[name].map, level[0].permute(1, 2, 0)) < 1e-5
    last = features[0, 1:] if model.num_prefix_tokens > 0 else features[0].flatten(1).t()
    assert relative_error(sinks["norm"].map.flatten(0, 1), last) < 1e-5


def test_a_linear_head_on_the_tokens():
    model, image, head = make_model("swin"), make_image(100, 90), nn.Linear(96, 4)
    with torch.no_grad():
        expected = head(model.forward_features(image)[0].permute(1, 2, 0))
        sink = TensorSink()
        inlinevit.stream(model, image, features={"norm": HeadSink(head.weight, head.bias, sink)})
    assert relative_error(sink.map, expected) < 1e-5
    with pytest.raises(ValueError, match=r"use a head of shape \(classes, 96\)"):
        inlinevit.stream(model, image, features={"norm": HeadSink(torch.ones(4, 95), None, TensorSink())})


@pytest.mark.parametrize("kind", FAMILIES)
def test_models_that_are_optimized_for_inference(kind):
    model, image = make_model(kind), make_image(70, 133)
    optimized = inlinevit.optimize_for_inference(model, compile=False)
    with torch.no_grad():
        assert relative_error(inlinevit.stream(optimized, image, chunk_rows=2), model(image)) < 1e-5


def test_int8_is_as_exact_as_in_the_plain_forward_pass():
    from inlinevit import kernels

    if not kernels.available():
        pytest.skip("int8 needs the native kernels")
    model, image = make_model("deit"), make_image(150, 203)
    optimized = inlinevit.optimize_for_inference(model, dtype="int8", compile=False)
    with torch.no_grad():
        exact, plain = model(image), optimized(image)
        streamed = inlinevit.stream(optimized, image)
    assert 0 < relative_error(streamed, exact) < 2 * relative_error(plain, exact) + 0.01


@pytest.mark.parametrize("kind", ["pvt", "inline windows"])
def test_spilled_results_are_the_same(kind, tmp_path, monkeypatch):
    model, image = make_model(kind), make_image(70, 133)
    in_memory = inlinevit.stream(model, image, chunk_rows=2)
    spill_always(monkeypatch)
    assert torch.equal(inlinevit.stream(model, image, spill=tmp_path, chunk_rows=2), in_memory)
    assert list(tmp_path.iterdir()) == []


class CountedSource:
    """An image source that notes which rows were read."""

    channels, fingerprint = 3, "counted"

    def __init__(self, image):
        self.image, self.size, self.read = image, (image.shape[3], image.shape[2]), []

    def rows(self, top, bottom):
        self.read += range(top, bottom)
        return self.image[0, :, top:bottom]


@pytest.mark.parametrize("kind", FAMILIES)
def test_rows_of_a_source_are_read_once_and_in_order(kind):
    image = make_image(69, 70)
    source, model = CountedSource(image), make_model(kind)
    out = inlinevit.stream(model, source, chunk_rows=1)
    assert source.read == list(range(69))
    assert relative_error(out, inlinevit.stream(model, image)) < 1e-5


def test_rows_of_another_shape_are_refused():
    source = CountedSource(make_image(69, 70))
    source.size = (71, 69)
    with pytest.raises(ValueError, match=r"should give float32 rows of shape \(3, 69, 71\), but it gave"):
        inlinevit.stream(make_model("deit"), source)


def test_progress_increases_to_one():
    reported = []
    inlinevit.stream(make_model("pvt"), make_image(100, 100), chunk_rows=2, progress=reported.append)
    assert reported == sorted(reported)
    assert len(reported) > 20
    assert 0 < reported[0] < 0.1
    assert reported[-1] == 1.0
    # Passes are weighted by their work: no step is a large part of it.
    assert max(after - before for before, after in pairwise(reported)) < 0.2


def test_neither_the_image_nor_the_model_is_changed():
    model, image = make_model("deit"), make_image(100, 100)
    weights, pixels = {name: value.clone() for name, value in model.state_dict().items()}, image.clone()
    inlinevit.stream(model, image)
    assert torch.equal(image, pixels)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


class FailingSink(TensorSink):
    """A sink that cannot write, and notes that it was aborted."""

    aborted = False

    def write_rows(self, top, rows):
        raise OSError("no space left")

    def abort(self):
        self.aborted = True


def test_a_failure_aborts_all_sinks():
    sinks = {"stages.0": FailingSink(), "norm": FailingSink()}
    with pytest.raises(OSError, match="no space left"):
        inlinevit.stream(make_model("swin"), make_image(64, 64), features=sinks)
    assert all(sink.aborted for sink in sinks.values())


def test_what_cannot_be_streamed_is_refused():
    model, image = make_model("deit"), make_image(64, 64)
    with pytest.raises(ValueError, match="Linear cannot be streamed: use a classification model"):
        inlinevit.stream(nn.Linear(2, 2), image)
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"):
        inlinevit.stream(make_model("deit").train(), image)
    with pytest.raises(ValueError, match="float32 on the CPU"):
        inlinevit.stream(make_model("deit").double(), image)
    with pytest.raises(ValueError, match="without pooling"):
        inlinevit.stream(make_model("deit", global_pool=""), image)
    with pytest.raises(ValueError, match="the batch has 2"):
        inlinevit.stream(model, image.expand(2, -1, -1, -1))
    with pytest.raises(ValueError, match="expected images of shape"):
        inlinevit.stream(model, image[:, :1])
    with pytest.raises(ValueError, match="an ImageSource, but got str"):
        stream_source(model, "image.tif")
    with pytest.raises(ValueError, match=r"the model has no map 'stages\.1': choose from stages\.0\.blocks\.0"):
        inlinevit.stream(model, image, features={"stages.1": TensorSink()})
    with pytest.raises(ValueError, match="chunk_rows is 0: it should be at least 1"):
        inlinevit.stream(model, image, chunk_rows=0)
    hooked = make_model("deit")
    hooked.head.register_forward_hook(lambda *arguments: None)
    with pytest.raises(ValueError, match="have hooks"):
        inlinevit.stream(hooked, image)


def test_softmax_over_a_huge_map_is_refused():
    class Huge:
        channels, size = 3, (30000, 30000)

        def rows(self, top, bottom):
            raise AssertionError("nothing should be read")

    with pytest.raises(ValueError, match="takes hours: use a model with InLine attention"):
        inlinevit.stream(make_model("softmax"), Huge(), memory="100GB")


def test_unknown_attentions_are_refused():
    class OtherAttention(type(make_model("angular").stage_list()[0].blocks[0].attn)):
        """A subclass may compute something else."""

    model = make_model("angular")
    model.stage_list()[0].blocks[0].attn.__class__ = OtherAttention
    with pytest.raises(ValueError, match="OtherAttention cannot be streamed: use a model with attention of InLine"):
        inlinevit.stream(model, make_image(64, 64))


@pytest.mark.parametrize("kind", ["angular", "focused"])
@pytest.mark.parametrize("size", [(150, 16), (100, 40), (16, 16), (17, 100)])
def test_narrow_maps_with_wide_convolutions(kind, size):
    """Rows shorter than the convolution along the tokens, which goes on in the next rows; a map of one token."""
    check(make_model(kind), make_image(*size), None, 1, 2)


@pytest.mark.parametrize("kind", ["angular", "focused"])
def test_masked_tokens_of_wide_convolutions_do_not_matter(kind):
    model, image = make_model(kind), make_image(96, 80)
    mask = torch.ones(6, 5, dtype=torch.bool)
    mask[0, :2] = mask[3:] = False
    changed = image.clone()
    changed[:, :, :16, :32] += 1
    changed[:, :, 48:] *= 2
    outs = [inlinevit.stream(model, one, mask=mask, chunk_rows=1) for one in (image, changed)]
    assert torch.equal(*outs)
    assert not torch.equal(outs[0], inlinevit.stream(model, image))
