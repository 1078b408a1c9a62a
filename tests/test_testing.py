"""Every check of `inlinevit.testing` finds an attention that breaks its promise, and says which one it is."""

import re

import pytest
import torch
from torch import nn

from inlinevit.layers import BaseAttention, LinearAttention, SoftmaxAttention, padding_mask
from inlinevit.testing import ATTENTION_CHECKS, check_attention
from tests import ROOT


class Good(BaseAttention):
    """Softmax attention in few words, with an explicit form."""

    row_wise = True

    def attend(self, q, k, v, windows):
        return self.attention_weights(q, k, v, windows).to(v.dtype) @ v

    def attention_weights(self, q, k, v, windows, attn_mask=None, first=0):
        scores, mask = q @ k.transpose(-2, -1), padding_mask(k, windows)
        visible = torch.ones_like(scores, dtype=torch.bool)
        visible = visible if mask is None else visible & mask[:, None, None, :]
        visible = visible if attn_mask is None else visible & attn_mask
        weights = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(dim=-1)
        return weights.masked_fill(~visible, 0)


class Free(BaseAttention):
    """A forward of its own, without windows: each token gets its value and the mean of all values."""

    supports_windows = supports_lepe = False

    def forward(self, x, feat_size, kernel_tokens=None):
        self.check_tokens(x, feat_size, kernel_tokens)
        v = self.qkv(x)[..., : self.dim]
        return self.proj_drop(self.proj(v + v.mean(dim=1, keepdim=True)))


class WithParameter(Good):
    """Adds a parameter to the output."""

    def __init__(self, dim, num_heads, **kwargs):
        super().__init__(dim, num_heads, **kwargs)
        self.shift = nn.Parameter(torch.zeros(1, device=kwargs.get("device"), dtype=kwargs.get("dtype")))

    def forward(self, x, feat_size, kernel_tokens=None):
        return super().forward(x, feat_size, kernel_tokens) + self.shift


class IgnoresDevice(WithParameter):
    def __init__(self, dim, num_heads, **kwargs):
        super().__init__(dim, num_heads, **kwargs)
        self.shift = nn.Parameter(torch.zeros(1))


class SquareMapsOnly(Good):
    def forward(self, x, feat_size, kernel_tokens=None):
        side = int((feat_size[0] * feat_size[1]) ** 0.5)
        return super().forward(x, (side, side), kernel_tokens)


class PrefixSeesItself(Good):
    def attend(self, q, k, v, windows):
        return v


class UncheckedTokens(Free):
    def check_tokens(self, x, feat_size, kernel_tokens):
        pass


class SeesAllWindows(Good):
    def forward(self, x, feat_size, kernel_tokens=None):
        return super().forward(x, feat_size, kernel_tokens) + x.mean(dim=1, keepdim=True)


class SeesPadding(Good):
    def attention_weights(self, q, k, v, windows, attn_mask=None, first=0):
        return (q @ k.transpose(-2, -1)).softmax(dim=-1)


class IgnoresLepe(Free):
    supports_lepe = True


class IgnoresGate(Free):
    supports_gate = True


class GatesTheMapAlone(Good):
    supports_gate = True

    def apply_gate(self, out, x):
        prefix = x.shape[1] - 35
        return torch.cat([out[:, :prefix], super().apply_gate(out[:, prefix:], x[:, prefix:])], dim=1)


class IgnoresRope(Free):
    supports_rope = True


class RotatesPrefixTokens(Good):
    def project_qkv(self, x, feat_size, first_row=0):
        height, width = feat_size
        prefix = x.shape[1] - height * width
        return super().project_qkv(x, (height * width + prefix, 1) if prefix > 0 else feat_size, first_row)


class TakesAnything(Good):
    supports_gate = False

    def __init__(self, dim, num_heads, gate: bool = False, **kwargs):
        super().__init__(dim, num_heads, **kwargs)


class UnusedParameter(Good):
    def __init__(self, dim, num_heads, **kwargs):
        super().__init__(dim, num_heads, **kwargs)
        self.extra = nn.Linear(dim, dim, device=kwargs.get("device"), dtype=kwargs.get("dtype"))


class WrongGradient(Good):
    def attend(self, q, k, v, windows):
        return super().attend(q, k.detach(), v, windows)


class MixesImages(Good):
    def forward(self, x, feat_size, kernel_tokens=None):
        return super().forward(x - x.mean(dim=0, keepdim=True), feat_size, kernel_tokens)


class ChangesTokens(Good):
    def forward(self, x, feat_size, kernel_tokens=None):
        return super().forward(x.mul_(0.5) if not x.requires_grad else x, feat_size, kernel_tokens)


class Noisy(Good):
    def forward(self, x, feat_size, kernel_tokens=None):
        return super().forward(x + 1e-3 * torch.randn_like(x), feat_size, kernel_tokens)


class NoKernelTokens(Good):
    def forward(self, x, feat_size):
        return super().forward(x, feat_size)


class KeepsTheLargestMap(Good):
    def forward(self, x, feat_size, kernel_tokens=None):
        # A cache that other sizes change.
        self.widths = {*getattr(self, "widths", ()), feat_size[1]}
        return super().forward(x, feat_size, kernel_tokens) + len(self.widths)


class NoDropout(Free):
    def forward(self, x, feat_size, kernel_tokens=None):
        self.check_tokens(x, feat_size, kernel_tokens)
        return self.proj(self.qkv(x)[..., : self.dim])


class AlwaysFloat32(Good):
    def forward(self, x, feat_size, kernel_tokens=None):
        return super().forward(x, feat_size, kernel_tokens).float()


class Imprecise(Good):
    def attend(self, q, k, v, windows):
        # The digits of small numbers are lost.
        return super().attend(q, k, v + 100, windows) - 100


class IntegerBuffer(Good):
    def __init__(self, dim, num_heads, **kwargs):
        super().__init__(dim, num_heads, **kwargs)
        self.register_buffer("index", torch.arange(3, device=kwargs.get("device")))


class HiddenState(Good):
    def __init__(self, dim, num_heads, **kwargs):
        super().__init__(dim, num_heads, **kwargs)
        self.factor = torch.rand(1).item()

    def attend(self, q, k, v, windows):
        return self.factor * super().attend(q, k, v, windows)


class OnCpu(Good):
    def attend(self, q, k, v, windows):
        return super().attend(q, k, v, windows) * torch.ones(q.shape[2], 1, dtype=q.dtype)


class WrongWeights(Good):
    def attend(self, q, k, v, windows):
        return super().attend(2 * q, k, v, windows)


class WeightsWithoutMask(Good):
    def attention_weights(self, q, k, v, windows, attn_mask=None, first=0):
        return super().attention_weights(q, k, v, windows)


class NotRowWise(Good):
    def attend(self, q, k, v, windows):
        return super().attend(q - q.mean(dim=2, keepdim=True), k, v, windows)


class FailsInTraining(Good):
    def forward(self, x, feat_size, kernel_tokens=None):
        if self.training and x.shape[1] > 60:
            raise RuntimeError("not in training")
        return super().forward(x, feat_size, kernel_tokens)


class ManyGraphs(Good):
    def forward(self, x, feat_size, kernel_tokens=None):
        # A branch: newer versions of torch record the conversion of a tensor to a number in the same graph.
        if x.sum() > 0:
            x = x.clone()
        return super().forward(x, feat_size, kernel_tokens)


CASES = [
    ("contract", nn.Linear, "is not a subclass of inlinevit.layers.BaseAttention"),
    ("construction", IgnoresDevice, "shift is made with device and dtype"),
    ("construction", type("Decays", (Good,), {"no_weight_decay_names": ("table",)}), "there is no table"),
    ("shapes", SquareMapsOnly, "of any map .* It failed with"),
    ("prefix_tokens", PrefixSeesItself, "the output of prefix token 0 depends on the tokens of the map"),
    ("prefix_tokens", UncheckedTokens, "num_prefix_tokens=2 refuses 15 tokens"),
    ("wrong_inputs", UncheckedTokens, "too few tokens for the map are refused with a ValueError"),
    ("windows", SeesAllWindows, "tokens of one window have no influence on the other windows"),
    ("windows", SeesPadding, "keys at padding have no influence on attend"),
    ("lepe", IgnoresLepe, "self.lepe is added before the projection"),
    ("construction", TakesAnything, "supports_gate is False, so the constructor refuses gate"),
    ("gate", IgnoresGate, "self.gate of the tokens is multiplied before the projection"),
    ("gate", GatesTheMapAlone, "self.gate of the tokens is multiplied before the projection"),
    ("rope", IgnoresRope, "rope changes every output"),
    ("rope", RotatesPrefixTokens, "neither they nor the token at .0, 0. are rotated"),
    ("gradients", UnusedParameter, "extra.weight gets a gradient"),
    ("gradients", WrongGradient, "is the derivative of forward"),
    ("batch", MixesImages, "an image gives the same alone and in a batch"),
    ("purity", ChangesTokens, "does not change the tokens that it is given"),
    ("purity", Noisy, "gives the same bits each time"),
    ("purity", NoKernelTokens, "takes `kernel_tokens`.* It failed with TypeError"),
    ("purity", KeepsTheLargestMap, "maps of other sizes in between have no influence"),
    ("dropout", NoDropout, "in training mode, proj_drop drops values"),
    ("half_precision", AlwaysFloat32, "has this dtype, not torch.float32"),
    ("half_precision", Imprecise, "is close to float32"),
    ("state_dict", IntegerBuffer, "index in the state dict is floating-point"),
    ("state_dict", HiddenState, "a module with the same state dict gives the same output"),
    ("initialization", WithParameter, "shift is initialised by reset_parameters"),
    ("meta_device", OnCpu, "on the meta device"),
    ("attention_weights", WrongWeights, "forward is attention_weights @ v"),
    ("attention_weights", WeightsWithoutMask, "weights of masked tokens are zero"),
    ("row_wise", NotRowWise, "row_wise is True, so attend of the prefix tokens alone"),
    ("models", FailsInTraining, "Models of every family .* It failed with RuntimeError: not in training"),
    pytest.param("compile", ManyGraphs, "one graph.* It failed with Unsupported", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("attention", [Good, Free])
def test_attentions_that_keep_all_promises_pass(attention):
    check_attention(attention)


@pytest.mark.parametrize(("check", "attention", "message"), CASES)
def test_a_broken_promise_is_found(check, attention, message):
    with pytest.raises(AssertionError, match=f"(?s){message}"):
        check_attention(attention, checks=[check])


def test_every_check_can_fail():
    checks = {case.values[0] if hasattr(case, "values") else case[0] for case in CASES}
    assert checks == set(ATTENTION_CHECKS)


def test_all_broken_promises_are_listed():
    with pytest.raises(AssertionError, match="MixesImages breaks") as caught:
        check_attention(MixesImages, checks=["shapes", "batch", "purity", "half_precision"])
    assert re.fullmatch(
        r"MixesImages breaks 1 promise of an attention:\n- batch: with the whole map, .*", str(caught.value)
    )
    with pytest.raises(AssertionError) as caught:
        check_attention(AlwaysFloat32)
    assert {"shapes", "half_precision"} <= set(re.findall(r"^- (\w+): ", str(caught.value), re.MULTILINE))


def test_options_reach_the_constructor():
    check_attention(LinearAttention, checks=["shapes"], feature_map="exp")
    check_attention("linear", checks=["shapes", "models"], dim=16, num_heads=2, feature_map="exp")
    with pytest.raises(AssertionError, match="unknown feature map"):
        check_attention("linear", checks=["shapes"], feature_map="no such map")
    with pytest.raises(ValueError, match="there is no check 'shape': choose among contract, construction, shapes"):
        check_attention(SoftmaxAttention, checks=["shape"])


def test_the_docs_promise_what_is_checked():
    """One row in the table of docs/attentions.md per check, with its docstring."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|$", (ROOT / "docs" / "attentions.md").read_text(), re.MULTILINE)
    promises = {name: " ".join((check.__doc__ or "").split()) for name, check in ATTENTION_CHECKS.items()}
    assert [(name, promises[name]) for name in promises] == [row for row in rows if row[0] in promises]
