"""Commands that compute nothing answer at once: without torch and timm, in little time."""

import json
import subprocess
import sys

import pytest

from inlinevit import cli
from inlinevit.cli.commands import COMMANDS, Command
from tests import slow_except

# Runs a command; prints to stderr its seconds and the slow packages that it has imported.
SCRIPT = """
import json, sys, time
from inlinevit.cli import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    pass
slow = sorted({"torch", "timm", "torchvision", "numpy", "accelerate", "matplotlib"} & set(sys.modules))
print(json.dumps([time.process_time(), slow]), file=sys.stderr)
"""


def all_commands():
    """The words of all commands and subcommands."""
    for name, entry in COMMANDS.items():
        yield name
        if not isinstance(loaded := entry.load(), Command):
            yield from (f"{name} {sub}" for sub in loaded)


HELP = ["--help", "--version", "", "tran", *(f"{words} --help" for words in all_commands())]
LISTS = [
    "models",
    "models --task detection --json",
    "models --task segmentation --markdown",
    "models --filter *swin*",
    "recipes",
    "recipes embedded",
    "train --print_config --config inline_swin_tiny",
]


def run(words):
    """Return the seconds of a command in a process of its own; it may import no slow package."""
    command = [sys.executable, "-c", SCRIPT, *words.split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.stdout or words == "tran"
    seconds, slow = json.loads(ended.stderr.splitlines()[-1])
    assert slow == []
    return seconds


@pytest.mark.parametrize(
    "words", slow_except([*HELP, *LISTS], "--help", "tran", "train --help", "bench layer --help", "models")
)
def test_no_slow_package_is_imported(words):
    run(words)


@pytest.mark.integration
def test_no_help_imports_a_slow_package():
    """All of them in one process."""
    script = (
        SCRIPT.replace("main(sys.argv[1:])", "pass")
        + f"""
import contextlib, io
for words in {HELP!r}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            main(words.split())
        except SystemExit:
            pass
print(json.dumps(sorted({{"torch", "timm", "torchvision", "numpy", "accelerate", "matplotlib"}} & set(sys.modules))))
"""
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(ended.stdout.splitlines()[-1]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "seconds"), [*((words, 0.5) for words in HELP), *((words, 1.0) for words in LISTS)], ids=str
)
def test_answers_at_once(words, seconds):
    # Other processes on the same cores make this slower: the best of several counts.
    assert any(run(words) < seconds for _ in range(4))


@pytest.mark.parametrize("words", [words for words in HELP if words.endswith("--help")])
def test_every_command_has_help_and_its_usage_fits_a_line(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert ("--tokens" in output) == (words == "bench layer --help")
    # The docstrings under the fields of configurations are the help of options.
    has_config = "train" in words.split() or words == "bench loop --help"
    assert ("Largest norm of the gradients." in " ".join(output.split())) == has_config
    usage, blank, *_ = output.splitlines()
    assert usage.startswith(f"usage: inlinevit {words.removesuffix('--help')}")
    assert len(usage) <= 80
    assert blank == ""
