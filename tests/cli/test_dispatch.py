"""Which command is run, its help, and mistakes in command lines."""

import pytest

from inlinevit import cli
from inlinevit.cli.commands import COMMANDS, Command
from inlinevit.cli.dispatch import option_names
from inlinevit.cli.errors import SYNONYMS


def test_without_a_command_all_commands_are_listed(capsys):
    cli.main([])
    output = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert name in output
        assert command.help.split()[0] in output


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        (["--data.batch_sise", "3"], "--data.batch_size"),
        (["--dat.batch_size", "3"], "--data.batch_size"),
        (["--optimizer.weight-decay", "3"], "--optimizer.weight_decay"),
        (["--run.precision", "bf61"], "bf16"),
        (["--run.precison", "bf16"], "--run.precision"),
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


@pytest.mark.parametrize(
    ("command", "option", "right"),
    [
        ("train", "--learning_rate 1", "--optimizer.lr"),
        ("train", "--lr 1", "--optimizer.lr"),
        ("train", "-lr 1", "--optimizer.lr"),
        ("train", "--optimizer.learning-rate 1", "--optimizer.lr"),
        ("train", "--epochs 3", "--schedule.epochs"),
        ("train", "--batch-size 4", "--data.batch_size"),
        ("predict x photo.jpg", "--batch-size 4", "--batch_size"),
        ("bench model", "--batch-size 4", "--batches"),
        ("train", "--model inline_pvt_tiny", "--model.name"),
        ("detect train", "--model inline_pvt_tiny", "--model.backbone"),
        ("train", "--data photos", "--data.path"),
        ("train", "--num-classes 3", "--model.num_classes"),
        ("segment train", "--num-classes=3", "--model.num_classes"),
        ("train", "--pretrained", "--model.pretrained"),
        ("train", "--out folder", "--run.output"),
        ("eval x", "--gpu 0", "--device"),
        ("train", "--resume", "--run.resume"),
        ("train", "photos --hflip 0", "--augment.hflip"),
        ("train", "--model.lr 1", "--optimizer.lr"),
        ("multilabel train", "--weights file.pth", "--model.checkpoint"),
    ],
)
def test_names_that_other_tools_have_for_an_option_are_known(command, option, right, refused):
    code, line = refused(*command.split(), *option.split())
    assert code == 2
    assert line.endswith(f": did you mean {right}?")


def test_a_section_that_is_no_file_is_refused_in_a_sentence(refused):
    line = "error: --model takes a YAML file of its fields, which inline_pvt_tiny is not: did you mean --model.name?"
    assert refused("train", "--model", "inline_pvt_tiny") == (2, line)


def commands_of(entries):
    """All commands of a table, with those of its tables."""
    for entry in entries.values():
        found = entry.load()
        yield from [found] if isinstance(found, Command) else commands_of(found)


def test_every_option_that_is_suggested_for_a_synonym_exists():
    known = {option for command in commands_of(COMMANDS) for option in option_names(command.make_parser())}
    assert {right for rights in SYNONYMS.values() for right in rights} <= known
