"""Attentions of other packages: registering them, entry points, and what models make of them."""

from importlib.metadata import EntryPoint

import pytest
import timm
import torch
from timm.models._features_fx import create_feature_extractor
from torch import nn

import inlinevit
from inlinevit.analysis import watch
from inlinevit.layers import ATTENTIONS, BaseAttention, LinearAttention, find_attention, padding_mask, registry
from inlinevit.models import InLineCSWin, InLineDeiT, InLinePVT, InLineSwin

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}


class Mean(BaseAttention):
    """The mean of the values of a window; no N×N weights."""

    def attend(self, q, k, v, windows):
        mask = padding_mask(k, windows)
        mean = v.sum(dim=2, keepdim=True) / (v.shape[2] if mask is None else mask.sum(dim=1)[:, None, None, None])
        return mean.expand_as(q)


class Scaled(Mean):
    """With an argument of its own."""

    attn_kwargs_names = ("scale",)

    def __init__(self, dim, num_heads, *, scale: float = 2.0, **kwargs):
        super().__init__(dim, num_heads, **kwargs)
        self.scale = scale

    def attend(self, q, k, v, windows):
        return self.scale * super().attend(q, k, v, windows)


class ScaledToo(Scaled):
    """Takes the argument of the class that it is derived from."""

    def __init__(self, dim, num_heads, **kwargs):
        super().__init__(dim, num_heads, **kwargs)


class OnTheMap(Mean):
    """Neither windows, nor prefix tokens, nor lepe."""

    supports_windows = supports_prefix_tokens = supports_lepe = False


class Grid(Mean):
    """Learns something for each place of the grid."""

    learns_grid = True

    def __init__(self, dim, num_heads, *, grid: tuple[int, int], **kwargs):
        super().__init__(dim, num_heads, **kwargs)
        self.grid = grid


def test_a_registered_attention_is_an_argument_of_models():
    assert inlinevit.register_attention("mean", Mean) is Mean
    model = timm.create_model("inline_deit_tiny", attention="mean", **TINY)
    assert type(model.stages[0].blocks[0].attn) is Mean
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 3)
    assert "mean" in inlinevit.list_attentions()


def test_the_decorator_registers():
    @inlinevit.register_attention("mean")
    class Decorated(Mean):
        pass

    assert find_attention("mean") is Decorated


def test_the_same_class_may_be_registered_again():
    """A module may be imported under two names, and a class may be defined again in a notebook."""
    inlinevit.register_attention("mean", Mean)
    inlinevit.register_attention("mean", Mean)
    inlinevit.register_attention("average", Mean)
    again = type("Mean", (Mean,), {"__module__": Mean.__module__, "__qualname__": Mean.__qualname__})
    inlinevit.register_attention("mean", again)
    assert find_attention("mean") is again


def test_another_class_under_the_same_name_is_refused():
    inlinevit.register_attention("mean", Mean)
    with pytest.raises(ValueError, match=r"'mean' is already registered as .*test_registry\.Mean: choose another name"):
        inlinevit.register_attention("mean", Scaled)
    with pytest.raises(ValueError, match=r"'softmax' is already registered as inlinevit\.layers"):
        inlinevit.register_attention("softmax", Mean)


@pytest.mark.parametrize("name", ["", "my attention", "a:b", "1st", "a,b", "a=b", "a+b", 3, None])
def test_names_are_words(name):
    with pytest.raises(ValueError, match="letters, digits"):
        inlinevit.register_attention(name, Mean)


def made(**content):
    """A class derived from Mean."""
    return type("Made", (Mean,), content)


def init_without_kwargs(self, dim, num_heads, layout=None):
    pass


def init_with_other_names(self, channels, heads, **kwargs):
    pass


def init_without_type(self, dim, num_heads, scale=1.0, **kwargs):
    pass


@pytest.mark.parametrize(
    ("attention", "problem"),
    [
        ("mean", "is not a subclass of inlinevit.layers.BaseAttention: derive it"),
        (nn.MultiheadAttention, "is not a subclass of inlinevit.layers.BaseAttention"),
        (Mean(8, 2), "is not a subclass of inlinevit.layers.BaseAttention"),
        (BaseAttention, r"BaseAttention computes nothing: define attend\(q, k, v, windows\), or forward"),
        (made(row_wise="yes"), "Made.row_wise is 'yes': it should be True or False"),
        (made(attn_kwargs_names="scale"), "attn_kwargs_names should be a tuple of names"),
        (made(attn_kwargs_names=("scale",)), "'scale' in attn_kwargs_names of Made is not an argument of the constr"),
        (made(attn_kwargs_names=("scale",), __init__=init_without_type), "'scale' in attn_kwargs_names .* has no type"),
        (made(__init__=init_without_kwargs), r"does not take qkv_bias, lepe.*: take \*\*kwargs and pass them"),
        (made(__init__=init_with_other_names), "should begin with dim and num_heads, not channels, heads"),
        (made(learns_grid=True), "does not take grid"),
        (made(surroundings={"gate": True}), r"Made.surroundings should be an inlinevit.layers.Surroundings"),
        (made(attn_kwargs_names=("gate",)), "every attention has gate: leave it out of attn_kwargs_names of Made"),
    ],
)
def test_a_class_that_models_cannot_use_is_refused(attention, problem):
    with pytest.raises(ValueError, match=f"attention 'mine' cannot be registered: .*{problem}"):
        inlinevit.register_attention("mine", attention)
    assert "mine" not in ATTENTIONS


@pytest.mark.parametrize("kind", [Scaled, ScaledToo])
def test_attn_kwargs_of_a_registered_attention(kind):
    inlinevit.register_attention("scaled", kind)
    model = InLineDeiT(attention="scaled", attn_kwargs={"scale": 3.0}, **TINY)
    assert model.stages[0].blocks[0].attn.scale == 3.0
    with pytest.raises(ValueError, match="scale in attn_kwargs is many: it should be a number"):
        InLineDeiT(attention="scaled", attn_kwargs={"scale": "many"}, **TINY)
    with pytest.raises(
        ValueError, match="scaled attention has no argument 'scal' in attn_kwargs: choose one of cpe, gate"
    ):
        InLineDeiT(attention="scaled", attn_kwargs={"scal": 3.0}, **TINY)


def test_what_an_attention_does_not_support_is_refused():
    inlinevit.register_attention("on_the_map", OnTheMap)
    with pytest.raises(ValueError, match="OnTheMap has no place for prefix tokens: use class_token=False"):
        InLineDeiT(attention="on_the_map", **TINY)
    options = {**TINY, "class_token": False, "global_pool": "avg"}
    with pytest.raises(ValueError, match="OnTheMap attends to the whole map: leave out windows"):
        InLineDeiT(attention="on_the_map", window_size=2, **options)
    with pytest.raises(ValueError, match=r"OnTheMap does not add lepe.*: use another family"):
        InLineCSWin(attention="on_the_map", img_size=32, embed_dim=16)
    assert InLineDeiT(attention="on_the_map", **options)(torch.randn(1, 3, 32, 32)).shape == (1, 3)


def test_every_family_passes_the_grid():
    inlinevit.register_attention("grid", Grid)

    def grids(model):
        return [module.grid for module in model.modules() if isinstance(module, Grid)]

    images = {"attention": "grid", "img_size": (64, 96), "device": "meta"}
    deit = {"depth": 1, "patch_size": 8, "class_token": False, "global_pool": "avg"}
    assert grids(InLineDeiT(**images, **deit)) == [(8, 12)]
    assert grids(InLineDeiT(**images, **deit, window_size=9)) == [(8, 9)]
    stages = {"depths": (1, 1, 1, 1), **images}
    maps = [(16, 24), (8, 12), (4, 6), (2, 3)]
    assert grids(InLinePVT(**stages)) == grids(InLineSwin(**stages)) == grids(InLineCSWin(**stages)) == maps
    assert grids(InLineSwin(**stages, window_size=7)) == [(7, 7), (7, 7), (4, 6), (2, 3)]
    assert grids(InLineCSWin(**stages, window_size=1)) == maps


def test_it_can_be_traced_and_inference_is_the_same():
    """attend sees all queries unless the class says that it needs only some of them."""

    class Agents(Mean):
        """The queries matter as a whole."""

        def attend(self, q, k, v, windows):
            return super().attend(q, k, v, windows) * q.mean(dim=2, keepdim=True)

    inlinevit.register_attention("agents", Agents)
    model = InLineDeiT(attention="agents", **{**TINY, "depth": 2}).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(images)
        torch.testing.assert_close(create_feature_extractor(model, ["head"])(images)["head"], expected)
        optimized = inlinevit.optimize_for_inference(model, compile=False)
        torch.testing.assert_close(optimized(images), expected)


def test_analysis_names_it_or_says_that_it_has_no_weights():
    class Renamed(LinearAttention):
        pass

    inlinevit.register_attention("renamed", Renamed)
    names = []
    watch(
        InLineDeiT(attention="renamed", **TINY).eval(),
        torch.randn(1, 3, 32, 32),
        lambda layer: names.append(layer.attention),
    )
    assert names == ["renamed"]
    inlinevit.register_attention("mean", Mean)
    with pytest.raises(ValueError, match=r"blocks\.0\.attn \(Mean\) has no attention weights that could be inspected"):
        watch(InLineDeiT(attention="mean", **TINY).eval(), torch.randn(1, 3, 32, 32), names.append)


def test_a_pos_embed_of_its_own_is_loaded_as_it_is(tmp_path):
    class Positions(Mean):
        def __init__(self, dim, num_heads, **kwargs):
            super().__init__(dim, num_heads, **kwargs)
            self.pos_embed = nn.Parameter(torch.ones(dim))

    inlinevit.register_attention("positions", Positions)
    model = InLineDeiT(attention="positions", **TINY)
    model.stages[0].blocks[0].attn.pos_embed.data.fill_(3)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    other = InLineDeiT(attention="positions", **TINY)
    inlinevit.load_checkpoint(other, str(tmp_path / "weights.pth"))
    assert torch.all(other.stages[0].blocks[0].attn.pos_embed == 3)


# Entry points


@pytest.fixture
def offer(monkeypatch):
    """Makes installed packages offer attentions: name=value."""

    def install(*points):
        def entry_points(group):
            assert group == "inlinevit.attentions"
            return [EntryPoint(name, value, group) for name, value in points]

        monkeypatch.setattr(registry, "entry_points", entry_points)

    return install


def test_an_entry_point_is_loaded_when_its_name_is_used(offer):
    offer(("mean", f"{__name__}:Mean"), ("broken", "no_such_package:Attention"))
    assert "mean" not in ATTENTIONS
    model = InLineDeiT(attention="mean", **TINY)
    assert type(model.stages[0].blocks[0].attn) is Mean
    assert registry.modules_of_attentions(model) == {"mean": Mean.__module__}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("no_such_package:Attention", "ModuleNotFoundError: No module named 'no_such_package'"),
        (f"{__name__}:no_such_class", "AttributeError: .*no_such_class"),
        (f"{__name__}:TINY", "ValueError: .*is not a subclass of inlinevit.layers.BaseAttention"),
    ],
)
def test_a_broken_entry_point_is_reported_and_the_others_work(offer, value, problem):
    offer(("broken", value), ("mean", f"{__name__}:Mean"))
    message = rf"attention 'broken' of \S+ cannot be loaded \({problem}.*\): fix or uninstall it"
    with pytest.raises(ValueError, match=message):
        InLineDeiT(attention="broken", **TINY)
    with pytest.warns(UserWarning, match=message):
        names = inlinevit.list_attentions()
    assert "mean" in names
    assert "broken" not in names


def test_entry_points_do_not_replace_attentions(offer):
    before = ATTENTIONS["softmax"]
    offer(("softmax", f"{__name__}:Mean"))
    assert find_attention("softmax") is before
    with pytest.warns(UserWarning, match="'softmax' is already registered"):
        inlinevit.list_attentions()


def test_two_packages_with_the_same_name_are_refused(offer):
    offer(("mean", f"{__name__}:Mean"), ("mean", f"{__name__}:Mean"))
    assert find_attention("mean") is Mean
    offer(("scaled", f"{__name__}:Mean"), ("scaled", f"{__name__}:Scaled"))
    with pytest.raises(ValueError, match=r"'scaled' is offered by .*Mean and .*Scaled: uninstall one of them"):
        find_attention("scaled")


def test_an_unknown_name_is_refused_with_all_names(offer):
    offer(("mean", f"{__name__}:Mean"))
    message = (
        r"unknown attention 'men': choose one of angular, .*, mean, .*softmax, or import the module.*--import MODULE"
    )
    with pytest.raises(ValueError, match=message):
        InLineDeiT(attention="men", **TINY)
