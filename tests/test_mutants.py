"""The deliberate mistakes of tools/mutants.py can still be made: their code stands once in the file that they name."""

import tomllib

import pytest

from tests import ROOT

MUTANTS = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text())["mutant"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant["name"] for mutant in MUTANTS])
def test_a_mutant_applies(mutant):
    assert (ROOT / "src" / "inlinevit" / mutant["file"]).read_text().count(mutant["old"]) == 1
    assert mutant["old"] != mutant["new"]
    assert all((ROOT / "tests" / name).exists() for name in mutant["tests"])
