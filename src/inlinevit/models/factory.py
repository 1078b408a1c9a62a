"""Creates models of ours and of timm's by name, with weights from files, for all tasks."""

import inspect
import re
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import build_model_with_cfg, get_pretrained_cfg, is_model, model_entrypoint, split_model_name_tag
from torch import Tensor, nn

from ..utils.files import parse_yaml
from ..utils.memory import require_memory_for_images, require_memory_for_model
from ..utils.validation import did_you_mean, require, shorten
from ._pretrained import downloading
from ._weight_files import FLOATS, classes_of_head, describe, one_line, require_floats

# Arguments of timm.create_model that are not those of a model: the commands set them.
NO_OPTIONS = {
    *inspect.signature(timm.create_model).parameters,
    *inspect.signature(build_model_with_cfg).parameters,
    "features_only",
    "out_indices",
    "device",
    "dtype",
}
KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# Arguments that say which weights a model gets.
WEIGHT_ARGUMENTS = ("pretrained", "pretrained_cfg_overlay")

# Arguments of timm.create_model that say where weights come from: addresses, files, folders.
WEIGHT_OPTIONS = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")


def check_model_name(name: str) -> None:
    """Refuse a name that neither we nor timm have, and suggest a similar one."""
    if ":" in name:
        # timm would fetch what such a name says, or read it from a folder.
        raise ValueError(
            f"{name!r:.100} names a source, but a model is named by its architecture: see `inlinevit models`"
        )
    if not is_model(name):
        near = did_you_mean(split_model_name_tag(name)[0], timm.list_models())
        hint = near or "`inlinevit models` lists ours, timm.list_models() all"
        raise ValueError(f"there is no model called {name!r}: {hint}")
    try:
        get_pretrained_cfg(name)
    except RuntimeError as error:
        base, tag = split_model_name_tag(name)
        tags = sorted(published.partition(".")[2] for published in timm.list_pretrained(f"{base}.*"))
        raise ValueError(
            f"{base} has no published weights called {tag!r}: choose among {', '.join(tags) or 'none'}"
        ) from error


def is_ours(name: str) -> bool:
    """Whether a model is of this library."""
    return model_entrypoint(split_model_name_tag(name)[0]).__module__.startswith(f"{__package__.partition('.')[0]}.")


def create_model(
    name: str,
    arguments: dict[str, Any],
    *,
    optional: dict[str, Any],
    options: dict[str, Any],
    config_fields: dict[str, str],
    when_refused: Callable[[str], None] = lambda argument: None,
) -> nn.Module:
    """Create a model, with those arguments that not all models take only where they are taken.

    Args:
        name: The name that timm knows.
        arguments: Arguments of timm.create_model.
        optional: More arguments, for models that take them; None = leave the argument out.
        options: The user's model.kwargs.
        config_fields: Arguments that must not be among them, each with the field of `model` to set instead.
        when_refused: Called with each optional argument that the model does not take.

    Raises:
        ValueError: There is no such option, or the model cannot be created with it.
    """
    for option in options:
        if option in WEIGHT_OPTIONS:
            raise ValueError(f"{option} stands in model.kwargs: name weights with model.checkpoint instead")
        if option in config_fields:
            raise ValueError(f"{option} stands in model.kwargs: set model.{config_fields[option]} instead")
        if option in NO_OPTIONS:
            raise ValueError(f"{option} stands in model.kwargs, but is not an option of a model: leave it out")
    if img_size := optional.get("img_size"):
        require_memory_for_images(1, arguments.get("in_chans", 3), img_size, img_size, "choose a smaller img_size")
    wanted = {argument: value for argument, value in optional.items() if value is not None}
    known = supported_arguments(name) if wanted or options else []
    for argument in wanted.keys() - set(known):
        when_refused(argument)
        del wanted[argument]
    given = {**options, **({"img_size": img_size} if "img_size" in wanted else {})}
    try:
        if given:
            weightless = {key: value for key, value in arguments.items() if key not in WEIGHT_ARGUMENTS}
            require_memory_for_model(
                lambda: timm.create_model(name, **weightless, **wanted, **options),
                f"{name} with {_listed(given)}",
                "choose smaller values",
            )
        return timm.create_model(name, **arguments, **wanted, **options)
    except (OSError, ValueError):
        raise
    except Exception as error:
        unknown = [option for option in options if option not in known]
        if isinstance(error, TypeError) and unknown:
            choices = [argument for argument in known if argument not in config_fields]
            hint = did_you_mean(unknown[0], choices) or f"there are {', '.join(choices)}"
            raise ValueError(f"{name} has no option {unknown[0]!r}, which stands in model.kwargs: {hint}") from error
        # Models of timm's do not check their arguments, and fail somewhere on those that make no sense.
        if not given or arguments.keys() & set(WEIGHT_ARGUMENTS):
            raise
        problem = " ".join(f"{type(error).__name__} {error}".split())[:200]
        raise ValueError(f"{name} cannot be made with {_listed(given)} ({problem}): correct them") from error


@cache
def supported_arguments(name: str) -> list[str]:
    """Return the keyword arguments of a model's class, by the name that timm knows.

    A class whose constructor passes others on, as **kwargs, takes those of the class it is derived from as well.
    """
    names: dict[str, None] = {}
    for kind in _class_of(name).__mro__:
        if kind is nn.Module:
            break
        if "__init__" in vars(kind):
            parameters = inspect.signature(vars(kind)["__init__"]).parameters.values()
            names |= {parameter.name: None for parameter in parameters if parameter.kind in KEYWORDS}
            if not any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters):
                break
    return [parameter for parameter in names if parameter != "self"]


def _class_of(name: str) -> type[nn.Module]:
    """The class of a model; entry points do not tell it, so the model is created on the meta device if it can be."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return type(timm.create_model(name))
        except (RuntimeError, NotImplementedError):
            return type(timm.create_model(name))


def _listed(given: dict[str, Any]) -> str:
    return ", ".join(f"{option} {shorten(value)}" for option, value in given.items())


def create_published(name: str, create: Callable[[], nn.Module], option: str) -> nn.Module:
    """Create a model with its published weights.

    Args:
        name: The name that timm knows.
        create: Creates it and downloads the weights.
        option: What names a local file of weights instead, for messages.

    Raises:
        PretrainedWeightsError: They cannot be downloaded.
        ValueError: There are none.
    """
    try:
        with downloading(name, get_pretrained_cfg(name), f"name a local file with {option}"):
            return create()
    except RuntimeError as error:
        raise ValueError(f"{name} has no published weights ({error}): name a local file with {option}") from error


def create_from_weights(
    file: str,
    name: str,
    weights: dict[str, Tensor],
    classes: int | None,
    create: Callable[..., nn.Module],
) -> nn.Module:
    """Create a model of timm's with the weights of a file, which must have all weights of the model.

    Args:
        file: For messages.
        name: The name that timm knows.
        weights: The weights in the file.
        classes: Their number of classes; None = as many as the published ones have.
        create: Creates the model, given arguments of timm.create_model that name weights, or none.

    Raises:
        ValueError: The file has weights of another model.
    """
    require_floats(weights, file)
    # timm's own way to published weights: it knows how each family's are resized and which channels they are for.
    overlay: dict[str, Any] = {"label_offset": 0}
    if classes is not None:
        overlay["num_classes"] = classes

    def load(state_dict: dict[str, Tensor]) -> nn.Module:
        return create(pretrained=True, pretrained_cfg_overlay={**overlay, "state_dict": state_dict})

    try:
        # timm takes names out of the dictionary that it is given.
        model = load(dict(weights))
        if model.state_dict().keys() - weights.keys():
            # timm loads some models without being strict.
            with torch.random.fork_rng(devices=[]):
                _require_loaded(load({key: _as_nan(weight) for key, weight in weights.items()}))
    # timm's functions for published weights fail in many ways on others.
    except Exception as error:
        # If the arguments are to blame, this says so.
        create()
        problem = " ".join(str(error).split())
        raise ValueError(
            f"{file} does not hold the weights of {name} ({type(error).__name__}: {problem[:200]}): choose the model "
            "that the file was made for"
        ) from error
    return model


def _as_nan(weight: Tensor) -> Tensor:
    """Return NaN in the shape of a weight; integers stay as they are."""
    return torch.full_like(weight, torch.nan) if weight.is_floating_point() else weight


def _require_loaded(model: nn.Module) -> None:
    """Refuse a model that was loaded with weights that are all NaN if one of its parameters is not NaN.

    So the names and shapes are compared after timm has converted them, whatever it does to names.
    """
    for name, parameter in model.named_parameters():
        # On the meta device, there are no values; a process with values checks them.
        if not parameter.is_meta and not parameter.isnan().any():
            raise KeyError(f"{name} is not in it")


def load_weights(
    model: nn.Module, weights: dict[str, Tensor], file: str | Path, *, by_class: Sequence[str] = ()
) -> None:
    """Load the weights of a whole model, which must fit.

    Args:
        model: The model; it is left as it was if they do not.
        weights: Its weights, or those of another one of its kind.
        file: Where they come from, for messages.
        by_class: Layers whose width is the number of classes, by a part of their names: where it differs, they keep
            their random weights, with a warning.
    """
    own = model.state_dict()
    layers = {name.rpartition(".")[0] for name in own if any(f".{layer}." in f".{name}" for layer in by_class)}
    new = {name for layer in layers for name in _new_weights(layer, own, weights)}
    misfits = sorted(name for name in own.keys() | weights.keys() if name not in new and not _fits(name, own, weights))
    if misfits:
        first = misfits[0]
        found, wanted = weights.get(first), own.get(first)
        raise ValueError(
            f"{file} does not hold the weights of this model (such as {one_line(first)}, which is "
            f"{'missing' if found is None else _shown(found, wanted)} in place of "
            f"{'nothing' if wanted is None else _shown(wanted, found)}): choose weights that were made with the same "
            "settings"
        )
    if new:
        first = sorted(new)[0]
        warnings.warn(
            f"{file} is for another number of classes ({first} has {len(weights[first])} rows in place of "
            f"{len(own[first])}): the last layers start from random weights",
            stacklevel=2,
        )
    model.load_state_dict({name: weight for name, weight in weights.items() if name not in new}, strict=False)


def _shown(value: Tensor, other: Tensor | None) -> str:
    """The shape of a weight, or its type as well where the shape is not what differs from another one."""
    return describe(value) if other is not None and value.shape == other.shape else str(tuple(value.shape))


def _fits(name: str, own: dict[str, Tensor], weights: dict[str, Tensor]) -> bool:
    """Whether a weight of a file can take its place in a model."""
    if name not in own or name not in weights:
        return False
    found, wanted = weights[name], own[name]
    return found.shape == wanted.shape and (found.dtype in FLOATS) == wanted.is_floating_point()


def _new_weights(layer: str, own: dict[str, Tensor], weights: dict[str, Tensor]) -> list[str]:
    """The weights of a layer if it is well-formed, but for another number of classes; none otherwise."""
    names = [name for name in own if name.rpartition(".")[0] == layer]
    if not all(name in weights and weights[name].dim() == own[name].dim() > 0 for name in names):
        return []
    rows = {len(weights[name]) for name in names}
    alike = all(
        weights[name].shape[1:] == own[name].shape[1:] and weights[name].dtype in FLOATS and len(own[name]) not in rows
        for name in names
    )
    return names if alike and len(rows) == 1 and 0 not in rows else []


def classes_of_weights(name: str, weights: dict[str, Tensor], file: str | Path) -> int | None:
    """Return the number of classes of the head among weights; None if there is no head under the model's name for it.

    Args:
        name: The name that timm knows.
        weights: The weights.
        file: Where they come from, for messages.

    Raises:
        ValueError: The head is malformed.
    """
    found = {head: classes_of_head(weights, head, file) for head in _heads(name)}
    numbers = {classes for classes in found.values() if classes is not None}
    if len(numbers) > 1:
        listed = " and ".join(f"{head} for {classes}" for head, classes in found.items())
        raise ValueError(f"{file} has heads for different numbers of classes ({listed}): fetch or save it again")
    return numbers.pop() if numbers else None


def _heads(name: str) -> list[str]:
    """Return the names of a model's heads; most have one."""
    made_for = get_pretrained_cfg(name)
    heads = made_for.classifier if made_for is not None else None
    return [] if not heads else [heads] if isinstance(heads, str) else list(heads)


@torch.no_grad()
def check_input_size(model: nn.Module, shape: tuple[int, int, int], problem: str, remedy: str) -> None:
    """Refuse a model of timm's that does not support images of a shape: some only fail in their first forward pass.

    Args:
        model: The model.
        shape: Channels, height and width.
        problem: What is wrong, if it fails.
        remedy: What to do instead.
    """
    was_training = model.training
    try:
        model.eval()(torch.zeros(1, *shape, device=next(model.parameters()).device))
    except (AssertionError, RuntimeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise ValueError(f"{problem} ({' '.join(str(error).split())[:200]}): {remedy}") from error
    finally:
        model.train(was_training)


def parse_model(text: str) -> tuple[str, dict[str, Any]]:
    """Parse NAME:OPTION=VALUE,… into a name that timm knows and options; values may be lists, as in [8,4,2,1]."""
    name, _, words = text.partition(":")
    if not timm.is_model(name):
        near = did_you_mean(name, timm.list_models())
        raise ValueError(f"timm knows no model {name!r}: {near or 'timm.list_models() lists those it knows'}")
    options: dict[str, Any] = {}
    # Not at the commas within lists.
    for word in re.split(r",(?![^\[]*\])", words) if words else []:
        option, equals, value = word.partition("=")
        require(bool(option and equals), f"{word!r} in {text!r} is not an option: write NAME:OPTION=VALUE,OPTION=VALUE")
        options[option] = parse_yaml(value)
    return name, options
