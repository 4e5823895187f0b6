"""docs/plan.md shows what `posttrain plan` says."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from posttrain.cli import app
from posttrain.plan import inputs

PAGE = (Path(__file__).parents[3] / "docs" / "plan.md").read_text(encoding="utf-8")
EXAMPLE, TOO_SMALL = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)[:2]


@pytest.mark.parametrize(("shown", "gpu"), [(EXAMPLE, "h200"), (TOO_SMALL, "4090")])
def test_the_example_of_the_page_is_what_the_command_says(
    shown: str, gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = EXAMPLE.splitlines()[0].removeprefix("$ posttrain ").replace("h200", gpu)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(inputs, "_installed", lambda name: False)  # flash-attn takes less memory
    said = CliRunner().invoke(app, command.split()).stdout.splitlines()
    assert [line for line in shown.splitlines() if line not in said and not line.startswith(("$", "..."))] == []
