"""How tests import the scripts of the project, which are no package."""

import importlib
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


@pytest.fixture
def load(monkeypatch):
    """``load(NAME)``: the script as a module."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module
