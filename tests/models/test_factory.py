"""Arguments of models, and weights of whole models: they fit, or nothing is loaded."""

import re
from collections import OrderedDict

import pytest
import timm
import torch
from torch import Tensor, nn

from inlinevit.models.factory import create_from_weights, load_weights, supported_arguments

CLASSES = 5


def make(classes: int = CLASSES, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = {"body": nn.Conv2d(3, 4, 1), "norm": nn.BatchNorm2d(4), "classify": nn.Conv2d(4, classes, 1)}
    return nn.Sequential(OrderedDict(layers))


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_weights_that_fit_are_loaded() -> None:
    model, other = make(), copy_of(make(seed=1))
    load_weights(
        model, {name: value.double() if value.is_floating_point() else value for name, value in other.items()}, "f"
    )
    assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())


def test_layers_for_other_classes_are_left_out_with_a_warning() -> None:
    model, other = make(), copy_of(make(7, seed=1))
    before = copy_of(model)
    message = r"f is for another number of classes \(classify\.bias has 7 rows in place of 5\)"
    with pytest.warns(UserWarning, match=message):
        load_weights(model, other, "f", by_class=["classify"])
    after = model.state_dict()
    assert torch.equal(after["body.weight"], other["body.weight"])
    assert torch.equal(after["classify.weight"], before["classify.weight"])
    assert torch.equal(after["classify.bias"], before["classify.bias"])
    with pytest.raises(ValueError, match="does not hold the weights of this model"):
        load_weights(model, other, "f")


MISFITS: dict[str, dict[str, Tensor | None]] = {
    "scalar": {"classify.weight": torch.tensor(1.0), "classify.bias": torch.tensor(1.0)},
    "no rows": {"classify.weight": torch.ones(0, 4, 1, 1), "classify.bias": torch.ones(0)},
    "another rank": {"classify.weight": torch.ones(7, 4), "classify.bias": torch.ones(7)},
    "other channels": {"classify.weight": torch.ones(7, 3, 1, 1), "classify.bias": torch.ones(7)},
    "rows that disagree": {"classify.weight": torch.ones(7, 4, 1, 1), "classify.bias": torch.ones(6)},
    "weight alone": {"classify.weight": torch.ones(7, 4, 1, 1)},
    "bias alone": {"classify.bias": torch.ones(7)},
    "no bias": {"classify.weight": torch.ones(7, 4, 1, 1), "classify.bias": None},
    "integers by class": {
        "classify.weight": torch.ones(7, 4, 1, 1, dtype=torch.int64),
        "classify.bias": torch.ones(7, dtype=torch.int64),
    },
    "integers": {"body.bias": torch.ones(4, dtype=torch.int32)},
    "a fraction for a count": {"norm.num_batches_tracked": torch.tensor(0.5)},
    "missing": {"body.bias": None},
    "unexpected": {"more": torch.ones(1)},
    "name that breaks lines": {"more\nmore": torch.ones(1)},
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_nothing_is_loaded_of_weights_that_do_not_fit(misfit: str) -> None:
    model = make()
    before, weights = copy_of(model), copy_of(make(seed=1))
    for name, value in MISFITS[misfit].items():
        if value is None:
            del weights[name]
        else:
            weights[name] = value
    with pytest.raises(ValueError, match=r"f does not hold the weights of this model \(such as .*: choose") as caught:
        load_weights(model, weights, "f", by_class=["classify"])
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "known", "unknown"),
    [
        ("inline_swin_tiny", {"img_size", "drop_path_rate", "attention"}, {"strict_img_size", "self"}),
        ("resnet18", {"block", "drop_path_rate", "in_chans"}, {"img_size"}),
        ("swin_tiny_patch4_window7_224", {"img_size", "drop_path_rate", "strict_img_size"}, set()),
        # Its constructor takes *args and **kwargs: the arguments are those of VisionTransformer.
        ("deit_tiny_distilled_patch16_224", {"img_size", "drop_path_rate", "depth"}, {"kwargs", "args"}),
        # Has neither.
        ("vgg11", {"drop_rate"}, {"img_size", "drop_path_rate"}),
    ],
)
def test_supported_arguments(name: str, known: set[str], unknown: set[str]) -> None:
    state = torch.get_rng_state()
    found = set(supported_arguments(name))
    assert known <= found
    assert not unknown & found
    assert torch.equal(state, torch.get_rng_state())


def paper_name(name: str) -> str:
    """What the authors of PVTv2 call a weight of timm's model."""
    name = re.sub(r"^patch_embed\.", "patch_embed1.", name)
    name = re.sub(r"^stages\.(\d)\.downsample\.", lambda found: f"patch_embed{int(found[1]) + 1}.", name)
    name = re.sub(r"^stages\.(\d)\.blocks\.", lambda found: f"block{int(found[1]) + 1}.", name)
    name = re.sub(r"^stages\.(\d)\.norm\.", lambda found: f"norm{int(found[1]) + 1}.", name)
    return name.replace("dwconv.", "dwconv.dwconv.")


def test_weights_under_other_names_are_recognised() -> None:
    """timm converts the names; a weight that is missing is reported."""
    name = "pvt_v2_b0"

    def create(**more: object) -> nn.Module:
        return timm.create_model(name, num_classes=7, **more)

    weights = copy_of(create())
    published = {paper_name(key): value for key, value in weights.items()}
    assert published.keys() != weights.keys()
    model = create_from_weights("f", name, published, 7, create)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    del published["block1.0.attn.q.weight"]
    with pytest.raises(ValueError, match=rf"f does not hold the weights of {name} \(.*stages\.0\.blocks\.0\.attn\.q"):
        create_from_weights("f", name, published, 7, create)


def test_features_need_all_their_weights() -> None:
    """With features_only, timm is not strict: it would take any file."""
    name = "test_resnet"

    def create(**more: object) -> nn.Module:
        return timm.create_model(name, features_only=True, **more)

    weights = copy_of(timm.create_model(name, num_classes=7))
    body = create_from_weights("f", name, weights, 7, create)
    own = body.state_dict()
    assert torch.equal(own["layer1.0.conv1.weight"], weights["layer1.0.conv1.weight"])
    for wrong in ({"a": torch.ones(2)}, {key: value for key, value in weights.items() if "layer3.0.conv1" not in key}):
        with pytest.raises(ValueError, match=r"f does not hold the weights of test_resnet \(.* is not in it"):
            create_from_weights("f", name, wrong, 7, create)
