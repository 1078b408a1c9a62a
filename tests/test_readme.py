"""What the README shows runs, and its table is the catalog's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from inlinevit import cli

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run(code):
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_the_table_of_models_is_what_the_command_prints(capsys):
    cli.main(["models", "--markdown"])
    (table,) = re.findall(r"<!-- models -->\n(.*?)<!-- /models -->", README, re.DOTALL)
    assert table == capsys.readouterr().out
