"""Validation of the arguments of models and of the fields of configurations: types and ranges."""

import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from math import inf, isfinite
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, cast

# Larger values are mistakes, whatever the machine: pixels along a side, classes.
MOST_PIXELS = 2**16
MOST_CLASSES = 2**24
PLAIN_TYPES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    types.NoneType: "null",
}


class Range(NamedTuple):
    """A range of allowed numbers.

    Attributes:
        least: Lower bound.
        most: Upper bound.
        above_least: Whether the lower bound itself is not allowed.
        below_most: Whether the upper bound itself is not allowed.
    """

    least: float
    most: float
    above_least: bool = False
    below_most: bool = False

    def contains(self, number: float) -> bool:
        """Whether a number is allowed; NaN never is."""
        is_above = number > self.least if self.above_least else number >= self.least
        is_below = number < self.most if self.below_most else number <= self.most
        return is_above and is_below

    def describe(self, number: float) -> str:
        """Describe what a number that is not allowed should be."""
        if number > self.most:
            return f"{'below' if self.below_most else 'at most'} {self.most}"
        if number < self.least or (number == self.least and self.above_least):
            return f"{'above' if self.above_least else 'at least'} {self.least}"
        return f"from {self.least} to {'below ' if self.below_most else ''}{self.most}"


# Of fractions and probabilities.
FRACTION = Range(0, 1)


def has_type(value: Any, hint: Any) -> bool:
    """Whether a value has a type, one of those of configurations and of the arguments of models.

    Integers are numbers, booleans are not. Lists are accepted for tuples, because YAML has no tuples.
    """
    if hint is Any:
        return True
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(has_type(value, alternative) for alternative in inner)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in inner)
    if origin is tuple:
        same_length = isinstance(value, tuple | list) and len(value) == len(inner)
        return same_length and all(has_type(*pair) for pair in zip(value, inner, strict=True))
    if origin in (list, Sequence):
        is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return is_list and all(has_type(item, inner[0]) for item in value)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(
            has_type(key, inner[0]) and has_type(item, inner[1]) for key, item in value.items()
        )
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, hint)


def describe_type(hint: Any) -> str:
    """Describe a type for messages."""
    if hint in PLAIN_TYPES:
        return PLAIN_TYPES[hint]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe_type(alternative) for alternative in inner))
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin is tuple:
        return f"a list of {len(inner)}, each {describe_type(inner[0])}"
    if origin in (list, Sequence):
        return f"a list, each entry {describe_type(inner[0])}"
    if origin in (dict, Mapping):
        return f"names with values, each {describe_type(inner[1])}" if inner[1] in PLAIN_TYPES else "names with values"
    return hint.__name__


def check_value(name: str, value: Any, hint: Any, allowed: Range | None = None) -> None:
    """Refuse a value that has another type, holds NaN or infinity, or is out of range.

    Args:
        name: Its name, for messages.
        value: Anything.
        hint: The type that it should have.
        allowed: The range of the number, or of each number in a list or dict; None = any finite number.
    """
    if not has_type(value, hint):
        raise ValueError(f"{name} is {shorten(value)}: it should be {describe_type(hint)}")
    # Dicts without a range may hold anything.
    is_limited = isinstance(value, Mapping) and allowed is not None
    for number in numbers_in(list(value.values()) if is_limited else value):
        # Whole numbers may be too large for a float.
        if not isinstance(number, Integral) and not isfinite(number):
            raise ValueError(f"{name} is {shorten(value)}: it should be finite")
        if allowed is not None and not allowed.contains(number):
            raise ValueError(f"{name} is {shorten(value)}: it should be {allowed.describe(number)}")


def numbers_in(value: Any) -> Iterator[Any]:
    """Yield the numbers of a value: itself, or those in a list."""
    if has_type(value, float):
        yield value
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value:
            yield from numbers_in(item)


def shorten(value: Any, longest: int = 60) -> str:
    """Return a value on one line of at most `longest` characters, for messages, without control characters."""
    whole = value if isinstance(value, str) and value.strip() else repr(value)
    # Cut first, because it may be very long.
    text = " ".join(whole[: 10 * longest].split())
    text = text if len(text) <= longest else f"{text[: longest - 1]}…"
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def require(condition: bool, remedy: str) -> None:
    """Raise ValueError unless a condition holds; the remedy says what is wrong, and what to do."""
    if not condition:
        raise ValueError(remedy)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return a suggestion of the most similar name; "" if none is similar."""
    near = get_close_matches(word, list(choices), n=1)
    return f"did you mean {near[0]}?" if near else ""


def check_fields(config: Any, section: str, **limits: float | Range) -> None:
    """Refuse fields of other types than those annotated, NaN, infinity, empty text, and numbers out of range.

    Args:
        config: A dataclass of plain values.
        section: Its name in recipes and options; "" = the names of fields have no prefix.
        **limits: The ranges of fields, or their largest values; the caller checks what has no limit here.
    """
    for name, hint in _field_types(cast(Any, type(config))).items():
        value, title = vars(config)[name], f"{section}.{name}" if section else name
        limit = limits.get(name)
        allowed = limit if limit is None or isinstance(limit, Range) else Range(-inf, limit)
        check_value(title, value, hint, allowed)
        for text in value if isinstance(value, list) else [value]:
            is_empty = isinstance(text, str) and not text.strip()
            require(not is_empty, f"{title} is empty: give it a value, or leave it out")


@cache
def _field_types(kind: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields, by name."""
    hints = typing.get_type_hints(kind)
    return {one.name: hints[one.name] for one in fields(kind)}
