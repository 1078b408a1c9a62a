"""Changes to bytes and to plain structures. All randomness comes from the generator that is passed along."""

import copy
import re
from random import Random
from typing import Any

BYTES = (0, 1, 0x7F, 0x80, 0xFE, 0xFF, ord("\n"), ord('"'), ord("{"), ord("."))
INTEGERS = (0, 1, -1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1)
# Values for a place where another one is expected.
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    255,
    65536,
    2**31,
    2**53 + 1,
    2**64,
    -(2**63),
    10**30,
    0.5,
    -0.0,
    1e-320,
    1e308,
    float("inf"),
    float("-inf"),
    float("nan"),
    "",
    " ",
    "x",
    "a\nb",
    "\x1b[31m",
    "\ud800",
    "../../etc/passwd",
    "/dev/zero",
    "pipe:touch marker",
    "!!python/object/apply:os.system",
    "${x}",
    "{}",
    "x" * 5000,
    [],
    {},
    [[]],
    [None],
    {"": None},
    [1, 2, 3],
    [0, 0, 1, 1],
    {"size": [4, 4], "counts": [16]},
)
DEEP = (50, 400, 700, 2000)


def change_bytes(content: bytes, generator: Random, others: list[bytes], tokens: list[bytes]) -> bytes:
    """A content with one to several changes.

    Args:
        content: What is changed.
        generator: Decides.
        others: Contents of the same kind, to take parts from.
        tokens: Words that mean something in this format.
    """
    changed = bytearray(content)
    for _ in range(generator.choice((1, 1, 1, 2, 2, 3, 5, 10))):
        place = generator.randrange(len(changed) + 1)
        length = generator.choice((1, 1, 2, 4, 8, 16, 64, 256, max(1, len(changed) // 4)))
        change = generator.randrange(10)
        if change == 0 and changed:
            changed[place % len(changed)] ^= 1 << generator.randrange(8)
        elif change == 1 and changed:
            changed[place % len(changed)] = generator.choice((*BYTES, generator.randrange(256)))
        elif change == 2:
            del changed[place : place + length]
        elif change == 3:
            del changed[place:]
        elif change == 4:
            start = generator.randrange(len(changed) + 1)
            changed[place:place] = changed[start : start + length]
        elif change == 5:
            changed[place:place] = generator.randbytes(min(length, 64))
        elif change in (6, 7):
            width = generator.choice((1, 2, 4, 8))
            number = generator.choice(INTEGERS) % (1 << (8 * width))
            changed[place : place + width] = number.to_bytes(width, generator.choice(("little", "big")))
        elif change == 8 and tokens:
            token = generator.choice(tokens)
            end = place + (0 if generator.random() < 0.5 else len(token))
            changed[place:end] = token
        elif others:
            other = generator.choice(others)
            start = generator.randrange(len(other) + 1)
            changed[place : place + length] = other[start : start + length]
    return bytes(changed)


def change_tree(tree: Any, generator: Random) -> Any:
    """A copy of dicts, lists and plain values with one to several changes."""
    holder = [copy.deepcopy(tree)]
    for _ in range(generator.choice((1, 1, 1, 2, 3))):
        parent, key = generator.choice(_places(holder, []))
        change = generator.randrange(8)
        if change <= 2:
            parent[key] = copy.deepcopy(generator.choice(VALUES))
        elif change == 3:
            parent[key] = nested(generator.choice(DEEP), generator)
        elif change == 4 and parent is not holder:
            del parent[key]
        elif change == 5 and isinstance(parent, dict):
            parent[generator.choice(("", "x", f"{key}x", "a\nb", "id", "dict", "tensor"))] = parent.pop(key)
        elif change == 6 and isinstance(parent[key], list) and parent[key]:
            parent[key].append(copy.deepcopy(generator.choice(parent[key])))
        else:
            other, place = generator.choice(_places(holder, []))
            parent[key] = copy.deepcopy(other[place])
    return holder[0]


def nested(depth: int, generator: Random) -> str:
    """Stands for lists in lists or dicts in dicts, which writers of JSON and YAML could not write; see write_nested."""
    return f"@{generator.choice(('list', 'dict'))}-{depth}"


def write_nested(text: str) -> str:
    """A text of JSON or YAML in which structures that `nested` stands for are written out."""

    def structure(found: re.Match[str]) -> str:
        start, end = ("[", "]") if found[1] == "list" else ('{"a": ', "}")
        return start * int(found[2]) + "1" + end * int(found[2])

    return re.sub(r"""['"]@(list|dict)-(\d+)['"]""", structure, text)


def _places(parent: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Where values are, as (container, key); no deeper than changes are worth it."""
    todo: list[tuple[Any, int]] = [(parent, 0)]
    while todo:
        current, depth = todo.pop()
        keys = list(current) if isinstance(current, dict) else range(len(current))
        for key in keys:
            found.append((current, key))
            if isinstance(current[key], dict | list) and depth < 20:
                todo.append((current[key], depth + 1))
    return found
