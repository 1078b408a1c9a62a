"""Models of ours and of timm's, by name: what all tasks need to know to make one."""

import inspect
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timm
from timm.models import build_model_with_cfg, get_pretrained_cfg, is_model, model_entrypoint, split_model_name_tag
from torch import Tensor, nn

from ..checks import shorten
from .config import did_you_mean
from .memory import require_memory_for_model

# What timm takes besides the arguments of a model: the commands see to these.
NO_OPTIONS = {
    *inspect.signature(timm.create_model).parameters,
    *inspect.signature(build_model_with_cfg).parameters,
    "features_only",
    "out_indices",
    "device",
    "dtype",
}
# Arguments that say which weights a model gets.
WEIGHT_ARGUMENTS = ("pretrained", "pretrained_cfg_overlay")

# Arguments of timm.create_model that say where weights come from: addresses, files, folders.
WEIGHT_OPTIONS = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")


def check_model_name(name: str) -> None:
    """Refuse a model that neither we nor timm have, and name those that are called alike."""
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
    own_words: dict[str, str],
    when_refused: Callable[[str], None] = lambda argument: None,
) -> nn.Module:
    """A model, with those arguments that not all models take only where they are taken.

    Args:
        name: What timm calls it.
        arguments: What timm.create_model is given.
        optional: What it is given as well, if the model takes it; None = nothing.
        options: The user's model.options.
        own_words: Arguments that must not stand there, each with the field of `model` that is for it.
        when_refused: Is told the optional arguments that the model does not take.

    Raises:
        ValueError: There is no such option.
    """
    for option in options:
        if option in WEIGHT_OPTIONS:
            raise ValueError(f"{option} stands in model.options: name weights with model.checkpoint instead")
        if option in own_words:
            raise ValueError(f"{option} stands in model.options: set model.{own_words[option]} instead")
        if option in NO_OPTIONS:
            raise ValueError(f"{option} stands in model.options, but is not an option of a model: leave it out")
    # timm passes over those that are None.
    taken = dict(optional)
    given = {**options, **{argument: value for argument, value in optional.items() if argument == "img_size" and value}}
    while True:
        try:
            if given:
                weightless = {key: value for key, value in arguments.items() if key not in WEIGHT_ARGUMENTS}
                require_memory_for_model(
                    lambda: timm.create_model(name, **weightless, **taken, **options),  # noqa: B023
                    f"{name} with {_listed(given)}",
                    "choose smaller values",
                )
            return timm.create_model(name, **arguments, **taken, **options)
        except (OSError, ValueError):
            raise
        except Exception as error:
            refused = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if refused is not None and refused[1] in options:
                raise ValueError(_unknown_option(name, refused[1], own_words)) from error
            if refused is not None and refused[1] in taken:
                when_refused(refused[1])
                del taken[refused[1]]
                continue
            # Models of timm's do not check their arguments: what they cannot be made with, they stumble over somewhere.
            if not given or arguments.keys() & set(WEIGHT_ARGUMENTS):
                raise
            problem = " ".join(f"{type(error).__name__} {error}".split())[:200]
            raise ValueError(f"{name} cannot be made with {_listed(given)} ({problem}): correct them") from error


def _listed(given: dict[str, Any]) -> str:
    return ", ".join(f"{option} {shorten(value)}" for option, value in given.items())


def _unknown_option(name: str, option: str, own_words: dict[str, str]) -> str:
    arguments = inspect.signature(type(timm.create_model(name))).parameters
    known = [argument for argument in arguments if argument not in own_words]
    hint = did_you_mean(option, known) or f"there are {', '.join(known)}"
    return f"{name} has no option {option!r}, which stands in model.options: {hint}"


def create_published(name: str, create: Callable[[], nn.Module]) -> nn.Module:
    """A model with its published weights.

    Args:
        name: What timm calls it.
        create: Makes it, and fetches them.
    """
    try:
        return create()
    except OSError as error:
        raise OSError(
            f"the published weights of {name} cannot be fetched ({' '.join(str(error).split())[:200]}): check "
            "the connection, or name a file that holds them as checkpoint"
        ) from error
    except RuntimeError as error:
        raise ValueError(f"{name} has no published weights ({error}): name a file as checkpoint") from error


def create_from_weights(file: str, name: str, create: Callable[[], nn.Module]) -> nn.Module:
    """A model of timm's with the weights of a file.

    Args:
        file: For messages.
        name: What timm calls it.
        create: Makes it, and loads them.
    """
    try:
        return create()
    except (RuntimeError, KeyError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(
            f"{file} does not hold the weights of {name} ({problem[:200]}): choose the model that the file was made for"
        ) from error


def load_weights(
    model: nn.Module, weights: dict[str, Tensor], file: str | Path, *, by_class: Sequence[str] = ()
) -> None:
    """Load the weights of a whole model, which must fit.

    Args:
        model: The model.
        weights: Its weights, or those of another one of its kind.
        file: Where they come from, for messages.
        by_class: Layers whose width is the number of classes, by a part of their names: where it differs, they begin
            anew, with a warning.
    """
    own = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    given = {name: tuple(value.shape) for name, value in weights.items()}
    anew = {
        name
        for name in own.keys() & given.keys()
        if own[name] != given[name] and any(f".{layer}." in f".{name}" for layer in by_class)
    }
    misfits = sorted(name for name, _ in own.items() ^ given.items() if name not in anew)
    if misfits:
        first = misfits[0]
        raise ValueError(
            f"{file} does not hold the weights of this model (such as {first}, which is {given.get(first, 'missing')} "
            f"in place of {own.get(first, 'nothing')}): choose weights that were made with the same settings"
        )
    if anew:
        warnings.warn(f"{file} is for another number of classes: the last layers begin anew", stacklevel=2)
    model.load_state_dict({name: weight for name, weight in weights.items() if name not in anew}, strict=False)


def classes_of_weights(name: str, weights: dict[str, Tensor]) -> int | None:
    """For how many classes weights have a head; None if they have none under the name that the model gives it."""
    made_for = get_pretrained_cfg(name)
    head = made_for.classifier if made_for is not None else None
    weight = weights.get(f"{head if isinstance(head, str) else head[0]}.weight") if head else None
    return None if weight is None else weight.shape[0]
