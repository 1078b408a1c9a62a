"""`inlinevit info`."""

import json

import pytest

import inlinevit
from inlinevit import cli, kernels


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["info", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["inlinevit"] == inlinevit.__version__
    assert kernels.status().reason in facts["native kernels"]
    cli.main(["info"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(facts)
    assert all(fact in line for fact, line in zip(facts.values(), lines, strict=True))
