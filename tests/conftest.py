"""What tests of all parts use."""

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any

import pytest

# Runtimes of the extra `export` but ONNX Runtime. A process that had loaded all of them has once aborted when it forked
# data-loader workers later, so the fast tests do without these; the slow ones have them.
RUNTIMES = ("openvino", "nncf", "onnxscript")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "slow":
        # Modules that are None count as not installed.
        sys.modules.update(dict.fromkeys(RUNTIMES))  # type: ignore[arg-type]


@pytest.fixture(scope="session", autouse=True)
def parsers_are_made_once() -> Iterator[None]:
    """Making the parser of a task's command takes most of half a second: the tests share one."""
    from inlinevit.cli import eval, predict, train

    with pytest.MonkeyPatch.context() as patch:
        for module in (train, eval, predict):
            patch.setattr(module, "make_parser", partial(_cached_parser, cache(module.make_parser)))
        yield


def _cached_parser(make_parser: Callable[[Any], Any], entry: Any) -> Any:
    parser = make_parser(entry)
    # What an earlier command line had imported.
    vars(parser).pop("imports", None)
    return parser


@pytest.fixture(autouse=True)
def registered_attentions() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    yield
    registry = sys.modules.get("inlinevit.layers.registry")
    if registry is not None:
        for name in registry.MODULES:
            registry.ATTENTIONS.pop(name, None)
        registry.MODULES.clear()


@pytest.fixture(scope="session")
def file_limit() -> Callable[[int], AbstractContextManager[None]]:
    @contextmanager
    def limit(size: int) -> Iterator[None]:
        """A context in which files may have so many bytes: more end as they would on a full disk."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit


@pytest.fixture(scope="session")
def server() -> Iterator[Any]:
    """A process that forks the processes of jobs: tests/engine/running.py."""
    from tests.engine.running import Server

    server = Server()
    yield server
    assert server.process.stdin is not None
    server.process.stdin.close()
    server.process.wait()
