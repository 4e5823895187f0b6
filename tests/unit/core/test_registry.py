"""Registries name what is near, and plugins are imported once, or refused with one message."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from posttrain.core.errors import ConfigError
from posttrain.core.registry import Registry, load_plugins


def test_registry_gets_objects_and_imports_strings() -> None:
    registry: Registry[object] = Registry("thing", {"path": "pathlib:Path"})
    registry.register("one")(1)
    assert registry.get("path") is Path
    assert registry.get("one") == 1
    assert registry.names() == ["one", "path"]
    assert "path" in registry
    with pytest.raises(ConfigError, match="unknown thing 'pat'") as caught:
        registry.get("pat")
    assert caught.value.hint == "did you mean 'path'?"
    with pytest.raises(ConfigError, match="thing 'one' is registered twice"):
        registry.register("one")(2)


def plugin(folder: Path, text: str) -> str:
    folder.mkdir(exist_ok=True)
    file = folder / "my_plugin.py"
    file.write_text(f"import sys\n{text}\n")
    return str(file)


def test_plugins_are_imported_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(sys, "plugins_seen", seen, raising=False)
    first = plugin(tmp_path / "a", "sys.plugins_seen.append('a')")
    second = plugin(tmp_path / "b", "sys.plugins_seen.append('b')")  # the same file name in another folder
    load_plugins([first, second])
    load_plugins([second, first])
    assert seen == ["a", "b"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.py", "plugin file not found: missing.py"),
        ("no_such_package.task", "plugin no_such_package.task failed to import: ModuleNotFoundError"),
    ],
)
def test_missing_plugins(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_plugins([path])
    assert caught.value.hint


def test_plugin_that_raises_is_tried_again(tmp_path: Path) -> None:
    broken = plugin(tmp_path, "raise ValueError('boom')")
    for _ in range(2):
        with pytest.raises(ConfigError, match="failed to import: ValueError: boom"):
            load_plugins([broken])
