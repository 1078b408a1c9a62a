"""Which command is run, its help, and mistakes in command lines."""

import pytest

from inlinevit import cli
from inlinevit.cli.commands import COMMANDS


def test_without_a_command_all_commands_are_listed(capsys):
    cli.main([])
    output = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert name in output
        assert command.help.split()[0] in output


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        (["--data.batch_sise", "3"], "data.batch_size"),
        (["--dat.batch_size", "3"], "data.batch_size"),
        (["--optimizer.weight-decay", "3"], "optimizer.weight_decay"),
        (["--run.precision", "bf61"], "bf16"),
        (["--run.precison", "bf16"], "run.precision"),
    ],
)
def test_a_wrong_option_or_value_is_refused_with_the_nearest_right_one(arguments, right, refused):
    code, line = refused("train", *arguments)
    assert code == 2
    assert line.endswith(f"did you mean {right}?")


def test_a_wrong_command_is_refused_with_the_nearest_right_one(refused):
    assert refused("tran")[1].endswith("did you mean train?")


def test_values_that_make_no_sense_are_refused(refused):
    assert refused("train", "--data.batch_size", -3) == (
        1,
        "error: data.batch_size is -3: it should be at least 1",
    )
