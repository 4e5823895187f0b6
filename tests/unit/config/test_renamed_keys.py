"""Config keys that were renamed: how earlier names are read, and how a preset gets the current ones."""

import json
import warnings
from pathlib import Path

import pytest
import tomli
from typer.testing import CliRunner, Result

from posttrain.cli import app
from posttrain.config.aliases import RENAMED
from posttrain.config.keys import RenamedKeyWarning, flatten_tree, key_hint, leaf_keys
from posttrain.config.presets import resolve
from posttrain.config.writing import dump_toml
from posttrain.core.errors import ConfigError
from posttrain.generation.output import differences
from posttrain.plan.command import stored_config
from posttrain.runs.run import RunTarget
from posttrain.tracking.report.folder import RunFolder

OLD = """\
# A preset with earlier names.
command = "rl"          # for rl
extends = "tiny-arith"
rollout = { over_sample_rate = 0.5, carry_cancelled = true, exact = false }   # inline

[run]  # where it lives
	'trace_every'=2
"traces" = true   # quoted
name = "exact"

[tools.traces]
type = "calculator"  # `run.traces` in text stays
"""

NEW = (
    OLD.replace("{ over_sample_rate = 0.5, carry_cancelled =", "{ over_sample_rate = 0.5, partial_rollouts =")
    .replace("exact = false", "batch_invariant = false")
    .replace("'trace_every'", "'rollouts_every'")
    .replace('"traces" = true', '"rollouts" = true')
)


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def write(folder: Path, text: str) -> Path:
    file = folder / "mine.toml"
    file.write_bytes(text.encode())
    return file


def test_renamed_keys_are_of_the_tree_and_stay_in_their_section() -> None:
    for old, new in RENAMED.items():
        assert old not in leaf_keys()
        assert new in leaf_keys()
        assert old.rpartition(".")[0] == new.rpartition(".")[0]


def test_preset_with_earlier_names_resolves_to_the_same_config_with_one_warning(tmp_path: Path) -> None:
    old, new = (run("presets", "show", write(tmp_path, text)) for text in (OLD, NEW))
    assert old.exit_code == new.exit_code == 0
    assert old.stdout == new.stdout
    assert new.stderr == ""
    (line,) = old.stderr.splitlines()
    assert all(f"`{name}` is called `{current}`" in line for name, current in RENAMED.items())
    assert line.endswith(f"`posttrain presets migrate {tmp_path / 'mine.toml'}` rewrites it")


def test_set_reads_an_earlier_name_with_a_warning() -> None:
    with pytest.warns(
        RenamedKeyWarning, match=r"--set has renamed keys: `run.trace_every` is called `run.rollouts_every`"
    ):
        resolved = resolve("rl", "tiny-arith", ["run.trace_every=3"])
    assert resolved.config.run.rollouts_every == 3
    assert resolved.provenance["run.rollouts_every"] == "--set"


@pytest.mark.parametrize("source", ["--set", "preset", "migrate"])
def test_rejects_a_key_by_both_of_its_names(source: str, tmp_path: Path) -> None:
    text = 'command = "rl"\n[run]\ntraces = true\nrollouts = true\n'
    file = write(tmp_path, text)
    sets = ["--set", "run.traces=true", "--set", "run.rollouts=true"]
    done = {
        "--set": lambda: run("rl", "--preset", "tiny-arith", *sets, "--dry-run"),
        "preset": lambda: run("presets", "show", file),
        "migrate": lambda: run("presets", "migrate", file),
    }[source]()
    assert done.exit_code == 2
    assert "by two names: `run.traces` and `run.rollouts`" in done.stderr
    assert "hint: " in done.stderr
    assert file.read_text() == text


def test_explain_and_hints_name_the_current_key() -> None:
    explained = run("config", "explain", "rollout.exact")
    assert explained.stdout.startswith("rollout.batch_invariant\n")
    assert "rollout.exact is called rollout.batch_invariant here" in explained.stderr
    assert key_hint("rollout.exat", leaf_keys()) == "did you mean `rollout.batch_invariant`?"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (OLD, NEW),
        (OLD.replace("\n", "\r\n"), NEW.replace("\n", "\r\n")),
        ('run.traces=true # a\n"run" . "trace_every" = 2\n', 'run.rollouts=true # a\n"run" . "rollouts_every" = 2\n'),
        ("[rollout]\nn = 2\n[run]\ntraces = true\n[rollout.engine_options]\nexact = 1\n",
         "[rollout]\nn = 2\n[run]\nrollouts = true\n[rollout.engine_options]\nexact = 1\n"),
    ],
)  # fmt: skip
def test_migrate_changes_the_names_and_nothing_else(old: str, new: str, tmp_path: Path) -> None:
    file = write(tmp_path, old)
    done = run("presets", "migrate", file)
    assert done.exit_code == 0, done.output
    assert file.read_bytes() == new.encode()
    names = {name for name in RENAMED if name in flatten_tree(tomli.loads(old))}
    assert set(done.stdout.splitlines()) == {f"{file}: {name} -> {RENAMED[name]}" for name in names}


def test_migrate_does_not_write_a_file_without_earlier_names(tmp_path: Path) -> None:
    file = write(tmp_path, NEW)
    before = file.stat()
    done = run("presets", "migrate", file)
    assert done.exit_code == 0
    assert "nothing to change" in done.stdout
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[run\ntraces = true\n", "is not valid TOML"),
        (b"[run]\ntraces = true\ntraces = true\n", "is given twice"),
        (b"[run]\ntraces = '\xff'\n", "is not UTF-8"),
        (b'[run]\n"tr\\u0061ces" = true\n', "write `run.rollouts` for `run.traces` by hand"),
    ],
)
def test_migrate_refuses_a_file_that_it_cannot_rewrite(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(content)
    done = run("presets", "migrate", file)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "hint: " in done.stderr
    assert file.read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


def test_run_with_earlier_names_is_resumed_planned_and_reported(tmp_path: Path) -> None:
    sets = [f"run.dir='{tmp_path}'", "run.rollouts_every=2"]
    resolved = resolve("rl", "tiny-arith", sets)
    opened = RunTarget.find(resolved).open()
    opened.finish("interrupted")
    stored = opened.path / "config.toml"
    old = dump_toml(resolved.config)
    for name, current in RENAMED.items():
        old = old.replace(f"\n{current.rpartition('.')[2]} =", f"\n{name.rpartition('.')[2]} =")
    assert "trace_every = 2" in old
    stored.write_text(old)
    origins = json.loads((opened.path / "provenance.json").read_text())
    origins["run.trace_every"] = origins.pop("run.rollouts_every")
    (opened.path / "provenance.json").write_text(json.dumps(origins))

    expected = rf"{stored} has renamed keys: .*`run.trace_every` is called `run.rollouts_every`"
    with pytest.warns(RenamedKeyWarning, match=expected):
        assert stored_config(opened.path) == resolved.config
    with pytest.warns(RenamedKeyWarning, match=expected):
        folder = RunFolder.read(opened.path)
    assert folder.config["run.rollouts_every"] == 2
    assert folder.origins["run.rollouts_every"] == "--set"
    with pytest.warns(RenamedKeyWarning, match=expected):
        again = RunTarget.find(resolved).open()
    assert (again.resumed, again.changes) == (True, ())
    again.finish("interrupted")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the resumed run has stored its config by the current names
        assert stored_config(opened.path) == resolved.config


def test_responses_with_earlier_names_are_of_the_same_settings() -> None:
    old, new = (
        {"data": {"sha256": ""}, "settings": {key: False}} for key in ("rollout.exact", "rollout.batch_invariant")
    )
    with pytest.warns(RenamedKeyWarning):
        assert differences(old, new) == []


def test_stored_config_with_a_wrong_value_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('command = "rl"\n[rollout]\nn = 0\n')
    with pytest.raises(ConfigError, match=r"rollout\.n = 0"):
        stored_config(tmp_path)
