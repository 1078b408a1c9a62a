"""Attentions by name: those of this package, registered ones, and those that installed packages offer.

A package offers attentions as entry points of the group `inlinevit.attentions`. They are loaded when a name is not
known otherwise, or when all names are listed.
"""

import inspect
import re
import typing
import warnings
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar, overload

from timm.layers import register_notrace_module
from torch import nn

from ..utils.modules import IMPORTING
from ..utils.validation import require, shorten
from .agent_attention import AgentAttention
from .angular_attention import AngularAttention
from .base_attention import BaseAttention
from .circulant_attention import CirculantAttention
from .efficient_attention import EfficientAttention
from .enhanced_attention import EnhancedAttention
from .focused_attention import FocusedAttention
from .hydra_attention import HydraAttention
from .inline_attention import InLineAttention
from .linear_attention import LinearAttention
from .mala_attention import MALAAttention
from .mhla_attention import MHLAAttention
from .polaformer_attention import PolaFormerAttention
from .rala_attention import RALAAttention
from .softmax_attention import SoftmaxAttention
from .surroundings import SURROUNDINGS, Surroundings
from .vit3_attention import ViT3Attention

AttentionT = TypeVar("AttentionT", bound=type[BaseAttention])

PACKAGE = __name__.partition(".")[0]
ENTRY_POINTS = f"{PACKAGE}.attentions"
# The names of attention in the arguments of models.
ATTENTIONS: dict[str, type[BaseAttention]] = {
    "inline": InLineAttention,
    "softmax": SoftmaxAttention,
    "linear": LinearAttention,
    "hydra": HydraAttention,
    "efficient": EfficientAttention,
    "angular": AngularAttention,
    "enhanced": EnhancedAttention,
    "focused": FocusedAttention,
    "mala": MALAAttention,
    "rala": RALAAttention,
    "polaformer": PolaFormerAttention,
    "agent": AgentAttention,
    "vit3": ViT3Attention,
    "mhla": MHLAAttention,
    "circulant": CirculantAttention,
}
# The modules that registered those of other packages, by name.
MODULES: dict[str, str] = {}
# Letters, digits, _ and -: names are also written on command lines and in file names.
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
# What models pass to the constructor of every attention, besides the channels and the heads.
MODEL_ARGUMENTS = ("layout", "qkv_bias", "lepe", "proj_drop", "num_prefix_tokens", "device", "dtype")
FLAGS = (
    *("wants_dwconv_mlp", "learns_grid", "row_wise", "rotates_in_attend"),
    *("supports_windows", "supports_prefix_tokens", "supports_lepe", "supports_gate", "supports_rope"),
)


@overload
def register_attention(name: str, attention: AttentionT) -> AttentionT: ...


@overload
def register_attention(name: str) -> Callable[[AttentionT], AttentionT]: ...


def register_attention(name: str, attention: Any = None) -> Any:
    """Register an attention, so that every model takes its name: `timm.create_model(…, attention=name)`.

    `@register_attention("mine")` above a class does the same. docs/attentions.md describes what an attention is.

    Args:
        name: Its name: letters, digits, _ and -.
        attention: A subclass of BaseAttention; without it, a decorator for one is returned.

    Returns:
        The class.

    Raises:
        ValueError: Another attention has this name, or the class is not an attention that models can use.
    """
    if attention is None:
        return lambda decorated: register_attention(name, decorated)
    require(
        isinstance(name, str) and NAME.fullmatch(name) is not None,
        f'{name!r} cannot be the name of an attention: use letters, digits, _ and -, such as "my_attention"',
    )
    problem = contract_problem(attention)
    require(not problem, f"attention {name!r} cannot be registered: {problem}")
    known = ATTENTIONS.get(name, attention)
    # A class that was defined again, as in a notebook, replaces the former one.
    require(
        _path(known) == _path(attention),
        f"attention {name!r} is already registered as {_path(known)}: choose another name",
    )
    ATTENTIONS[name] = register_notrace_module(attention)
    if attention.__module__.partition(".")[0] != PACKAGE:
        MODULES[name] = IMPORTING[-1] if IMPORTING else attention.__module__
    return attention


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def contract_problem(attention: Any) -> str:
    """Return in what a class is not an attention that models can use, and what to do; "" if it is one."""
    if not isinstance(attention, type) or not issubclass(attention, BaseAttention):
        return f"{shorten(attention)} is not a subclass of inlinevit.layers.BaseAttention: derive it from that class"
    if not overrides(attention, "attend") and not overrides(attention, "forward"):
        return f"{attention.__name__} computes nothing: define attend(q, k, v, windows), or forward"
    for flag in FLAGS:
        if not isinstance(getattr(attention, flag), bool):
            return f"{attention.__name__}.{flag} is {getattr(attention, flag)!r:.60}: it should be True or False"
    surroundings: Any = attention.surroundings
    if not isinstance(surroundings, Surroundings):
        return (
            f"{attention.__name__}.surroundings should be an inlinevit.layers.Surroundings: use Surroundings(gate=True)"
        )
    for names in ("attn_kwargs_names", "no_weight_decay_names"):
        if not _is_tuple_of_names(getattr(attention, names)):
            return f'{attention.__name__}.{names} should be a tuple of names, such as ("scale",)'
    if clash := [name for name in attention.attn_kwargs_names if name in SURROUNDINGS]:
        return f"every attention has {', '.join(clash)}: leave it out of attn_kwargs_names of {attention.__name__}"
    types = constructor_types(attention)
    first = list(inspect.signature(attention).parameters)[:2]
    if first != ["dim", "num_heads"]:
        return f"the constructor of {attention.__name__} should begin with dim and num_heads, not {', '.join(first)}"
    needed = [*MODEL_ARGUMENTS, *(["grid"] if attention.learns_grid else [])]
    if missing := [argument for argument in needed if argument not in types]:
        return (
            f"the constructor of {attention.__name__} does not take {', '.join(missing)}: take **kwargs and pass "
            "them to that of BaseAttention" + (", and take grid" if "grid" in missing else "")
        )
    for argument in attention.attn_kwargs_names:
        if types.get(argument, inspect.Parameter.empty) is inspect.Parameter.empty:
            what = "has no type" if argument in types else "is not an argument of the constructor"
            return (
                f"{argument!r} in attn_kwargs_names of {attention.__name__} {what}: add it, as in {argument}: int = 3"
            )
    return ""


def _is_tuple_of_names(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) for name in value)


def overrides(attention: type[BaseAttention], method: str) -> bool:
    """Return whether a class, or one between it and BaseAttention, has a method of its own."""
    return getattr(attention, method) is not getattr(BaseAttention, method)


def constructor_types(attention: type[nn.Module]) -> dict[str, Any]:
    """Return the types of the arguments of a class, by name; inspect.Parameter.empty for those without a type.

    A constructor that takes **kwargs also takes the arguments of the class that it is derived from.
    """
    types: dict[str, Any] = {}
    for kind in attention.__mro__:
        if kind is nn.Module:
            break
        if "__init__" not in vars(kind):
            continue
        init = vars(kind)["__init__"]
        try:
            hints = typing.get_type_hints(init)
        except NameError:
            # Types that are imported for type checkers only.
            hints = {}
        parameters = list(inspect.signature(init).parameters.values())[1:]
        named = [parameter for parameter in parameters if parameter.kind != inspect.Parameter.VAR_KEYWORD]
        types = {p.name: hints.get(p.name, inspect.Parameter.empty) for p in named} | types
        if len(named) == len(parameters):
            break
    return types


def find_attention(name: str) -> type[BaseAttention]:
    """Return the attention of a name; an entry point of this name is loaded if there is no other.

    Raises:
        ValueError: There is none, or it cannot be loaded.
    """
    if name not in ATTENTIONS:
        offered = [point for point in _entry_points() if point.name == name]
        if not offered:
            raise ValueError(
                f"unknown attention {name!r}: choose one of {', '.join(list_attentions())}, or import the module that "
                "registers it (on the command line: --import MODULE)"
            )
        require(
            len(offered) == 1,
            f"attention {name!r} is offered by {' and '.join(map(_package, offered))}: uninstall one of them",
        )
        _load(offered[0])
    return ATTENTIONS[name]


def list_attentions() -> list[str]:
    """Return the names of all attentions, sorted. Entry points that cannot be loaded are left out, with a warning."""
    for point in _entry_points():
        try:
            _load(point)
        except ValueError as error:
            warnings.warn(str(error), stacklevel=2)
    return sorted(ATTENTIONS)


def is_known(name: str) -> bool:
    """Return whether there is an attention of this name; entry points are not loaded for this."""
    return name in ATTENTIONS or any(point.name == name for point in _entry_points())


def attention_name(attention: type[BaseAttention]) -> str:
    """Return the name of a class; that of the class itself if it is not registered."""
    return next((name for name, kind in ATTENTIONS.items() if kind is attention), attention.__name__)


def modules_of_attentions(model: nn.Module) -> dict[str, str]:
    """Return the attentions of a model that are of other packages, by name, with the modules that registered them."""
    kinds = {type(module) for module in model.modules() if isinstance(module, BaseAttention)}
    return {name: module for name, module in sorted(MODULES.items()) if ATTENTIONS[name] in kinds}


def _entry_points() -> list[EntryPoint]:
    """Return the attentions that installed packages offer, each once."""
    found: Iterable[EntryPoint] = entry_points(group=ENTRY_POINTS)
    return list({(point.name, point.value): point for point in found}.values())


def _load(point: EntryPoint) -> None:
    """Import and register the attention of an entry point."""
    try:
        register_attention(point.name, point.load())
    # Importing a package can fail in any way.
    except Exception as error:
        problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(
            f"attention {point.name!r} of {_package(point)} cannot be loaded ({problem}): fix or uninstall it"
        ) from error


def _package(point: EntryPoint) -> str:
    return point.value if point.dist is None else f"the package {point.dist.name}"
