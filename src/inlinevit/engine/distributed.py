"""Calls that several processes make together."""

from collections.abc import Callable
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import gather_object

Result = TypeVar("Result")


def run_on_all(accelerator: Accelerator, function: Callable[[], Result]) -> list[Result]:
    """Call a function in every process; if it fails in one of them, it fails in all.

    A process that ended alone would leave the others waiting for it. ValueError and OSError are shared; anything else
    ends its process alone.

    Returns:
        The results by process, the same in all of them.
    """
    if accelerator.num_processes == 1:
        return [function()]
    error: ValueError | OSError | None = None
    result: Result | None = None
    try:
        result = function()
    except (ValueError, OSError) as problem:
        error = problem
    shared: list[tuple[Result, str | None]] = gather_object([(result, None if error is None else str(error))])
    if error is not None:
        raise error
    for _, message in shared:
        if message is not None:
            raise ValueError(message)
    return [result for result, _ in shared]


def run_on_main(accelerator: Accelerator, function: Callable[[], Result]) -> Result:
    """Call a function in the main process; its result, or its error, is that of all. See run_on_all."""
    nothing: Callable[[], Result | None] = lambda: None  # noqa: E731
    results = run_on_all(accelerator, function if accelerator.is_main_process else nothing)
    # Narrowed here, because the main process has called the function itself.
    return results[0]  # type: ignore[return-value]


def run_local_main_first(accelerator: Accelerator, function: Callable[[], Result]) -> Result:
    """Call a function in one process of each machine, then in the others: they find downloaded files in the cache.

    As accelerate's local_main_process_first, but an error in one process ends all of them; see run_on_all.

    Returns:
        What the function returned in this process.
    """
    results: list[Result] = []
    for is_first in (True, False):
        if accelerator.is_local_main_process == is_first:
            run_on_all(accelerator, lambda: results.append(function()))
        else:
            run_on_all(accelerator, lambda: None)
    return results[0]
