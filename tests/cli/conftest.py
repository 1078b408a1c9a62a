"""Shared by the tests of commands."""

from collections.abc import Callable

import pytest

from inlinevit import cli


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs a command that is refused; returns its exit code and the one line that it prints."""

    def run(*arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        assert output.out == ""
        (line,) = [line for line in output.err.splitlines() if not line.startswith("warning:")]
        return ended.value.code, line

    return run
