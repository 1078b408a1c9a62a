"""The name of the processor."""

from pathlib import Path

import pytest

from inlinevit.benchmark.machine import processor_name

CORE = "processor\t: {core}\nvendor_id\t: x\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: {name}\n\n"


def cores(name: str) -> str:
    """A description of two cores."""
    return CORE.format(core=0, family=25, model=17, name=name) + CORE.format(core=1, family=99, model=98, name="other")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (cores("AMD EPYC"), "AMD EPYC (family 25, model 17)"),
        (cores("AMD EPYC 9B14"), "AMD EPYC 9B14"),
        (cores("Intel(R) Xeon(R) Processor @ 2.60GHz"), "Intel(R) Xeon(R) Processor @ 2.60GHz"),
    ],
)
def test_names_that_stand_for_several_processors_are_told_apart(text: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert processor_name(tmp_path / "cpuinfo") == name


def test_a_system_without_description_has_a_name(tmp_path: Path) -> None:
    assert processor_name(tmp_path / "missing")
    (tmp_path / "arm").write_text("processor\t: 0\nBogoMIPS\t: 243.75\n")
    assert processor_name(tmp_path / "arm") == processor_name(tmp_path / "missing")
