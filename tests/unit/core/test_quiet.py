"""A package is hidden from imports in a body, and found again after it."""

import sys
from importlib.util import find_spec

import pytest

from posttrain.core.quiet import hidden


def test_it_is_hidden_in_the_body_only(monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with pytest.raises(ModuleNotFoundError), hidden("colorsys"):
        assert find_spec("colorsys") is None
        import colorsys
    import colorsys

    assert colorsys.rgb_to_hsv(0, 0, 0) == (0, 0, 0)


def test_one_that_was_imported_stays():
    import json

    with hidden("json"):
        assert sys.modules["json"] is json
    assert sys.modules["json"] is json
