"""Commands of posttrain in the process of the tests, which has their libraries already."""

from __future__ import annotations

import contextlib
from pathlib import Path

from typer.testing import CliRunner, Result

from posttrain.cli import app


def invoke(cwd: Path, *arguments: str) -> Result:
    """Run ``posttrain ARGUMENTS`` in ``cwd``."""
    with contextlib.chdir(cwd):
        return CliRunner().invoke(app, arguments)


def succeed(cwd: Path, *arguments: str) -> Result:
    """As ``invoke``; the command must end with 0."""
    done = invoke(cwd, *arguments)
    assert done.exit_code == 0, (done.stderr[-3000:], done.exception)
    return done
