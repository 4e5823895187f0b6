"""The documents say what the code does: made pages are up to date, and every command and example in them is real."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from posttrain.cli import app
from posttrain.config.keys import leaf_keys
from posttrain.config.preset_files import list_presets
from posttrain.config.presets import resolve
from posttrain.core.errors import ConfigError
from posttrain.data.parquet import read_conversations, read_preferences, read_prompts, write_rows
from posttrain.runs.preflight import check_supported

REPO = Path(__file__).resolve().parents[3]
MINE = "mine.toml"
"""The reader's own preset."""
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]


def make_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_docs", REPO / "scripts" / "make_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["config", "cli", "data", "tools", "rollout_files", "from_verl", "models"])
def test_made_page_is_up_to_date(page: str) -> None:
    made = getattr(make_docs(), f"{page}_page")()
    stored = (REPO / "docs" / f"{page.replace('_', '-')}.md").read_text(encoding="utf-8")
    assert stored == made, "run scripts/make_docs.py"


def test_every_key_and_option_and_field_is_described() -> None:
    for page, fewest in (("config.md", 40), ("cli.md", 40), ("data.md", 40), ("rollout-files.md", 20)):
        rows = [line for line in (REPO / "docs" / page).read_text().splitlines() if line.startswith("| `")]
        assert len(rows) > fewest
        assert [row for row in rows if row.rstrip(" |").endswith("|") or "None" in row] == []


# ---------------------------------------------------------------------- commands


def snippets() -> Iterator[tuple[str, list[str]]]:
    """(page, words) of each command in the bash blocks."""
    for page in PAGES:
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.S | re.M):
            for line in block.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    yield page.name, words


def parse(words: list[str]) -> tuple[str, dict[str, Any]]:
    """A `posttrain` command's name and parameters, parsed as the CLI does it, but not run."""
    command: Any = typer.main.get_command(app)
    path = words[0]
    rest = words[1:]
    while hasattr(command, "commands") and rest and rest[0] in command.commands:
        command = command.commands[rest[0]]
        path, rest = f"{path} {rest[0]}", rest[1:]
    assert path != "posttrain", f"no such command: {shlex.join(words)}"
    return path, dict(command.make_context(path, rest).params)


@pytest.mark.parametrize(("page", "words"), [pytest.param(p, w, id=f"{p}: {shlex.join(w)}") for p, w in snippets()])
def test_command_in_the_docs_is_real(
    page: str, words: list[str], registries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPO)
    if words[0] == "sbatch":  # Slurm's, with a script of ours
        words = [word for word in words if word.endswith(".sbatch")]
        assert Path(words[0]).is_file()
        return
    if words == ["source", ".venv/bin/activate"]:  # after a script that makes it
        return
    if words[0] != "posttrain":
        found = os.access(words[0], os.X_OK) or Path(sys.executable).with_name(words[0]).is_file()
        assert found, f"{page} names {words[0]}, which is not an executable file"
        return
    path, params = parse(words)
    for file in params.get("plugin") or []:
        assert Path(file).is_file()
    if path == "posttrain presets show":
        known: dict[str, Any] = {preset.name: preset.command for preset in list_presets()}
        resolve(known[params["name"]], params["name"])
    if path in ("posttrain sft", "posttrain prefer", "posttrain rl", "posttrain generate"):
        flags = {
            "algo.name": params.get("algo"),
            "cluster.workers": params.get("workers"),
            "plugins": params.get("plugin"),
        }
        command: Any = path.removeprefix("posttrain ")
        preset = "tiny-arith" if params["preset"] == MINE else params["preset"]
        check_supported(resolve(command, preset, params["set_"] or [], flags).config)


def test_the_parser_of_this_test_refuses_what_the_cli_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["posttrain", "sft", "--preset", "x"])[1]["preset"] == "x"
    with pytest.raises(AssertionError, match="no such command"):
        parse(["posttrain", "tune"])
    for words, told in ((["sft", "--no-such"], "No such option"), (["version", "3"], "unexpected extra argument")):
        with pytest.raises(typer.Exit):
            parse(["posttrain", *words])
        assert told in capsys.readouterr().err


def test_readme_has_the_commands_people_copy() -> None:
    lines = [shlex.join(words) for page, words in snippets() if page == "README.md"]
    for line in (
        "scripts/quickstart",
        "scripts/test",
        "posttrain prep gsm8k --source DIR",
        "posttrain sft --preset tiny-multiturn",
        "posttrain rl --preset tiny-gsm8k --algo grpo --tools gsm8k",
        "posttrain generate --preset tiny-generate",
        "posttrain eval --pass-at 5",
        "posttrain merge-ckpt tiny-gsm8k --out merged",
    ):
        assert line in lines


def test_readme_tables_name_every_command_and_preset() -> None:
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    group: Any = typer.main.get_command(app)
    for name in group.commands:
        assert re.search(rf"^\| `posttrain {name}\b", readme, flags=re.M), name
    rows = dict(re.findall(r"^\| `([\w.-]+)` \| `\w+` \| .* \| (yes|no)\b.*\|$", readme, flags=re.M))
    assert sorted(rows) == sorted(preset.name for preset in list_presets())
    for preset in list_presets():
        try:
            check_supported(resolve(preset.command, preset.name).config)  # type: ignore[arg-type]
            runs = "yes"
        except ConfigError:
            runs = "no"
        assert rows[preset.name] == runs, preset.name


def test_the_index_names_every_page() -> None:
    named = set(re.findall(r"\]\(([\w-]+\.md)", (REPO / "docs" / "README.md").read_text(encoding="utf-8")))
    assert {page.name for page in PAGES} - named == {"README.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_messages_in_the_troubleshooting_page_are_those_of_the_code() -> None:
    """Of each quoted message, what stands between the `…` is in some string of the code."""
    source = "\n".join(
        node.value
        for file in (REPO / "posttrain").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    page = (REPO / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\|$", page, flags=re.M)
    spans = [span for row in rows for span in row.split("`")[1::2]]
    quoted = [span for span in spans if "…" in span or re.search(r"[a-z]+ [a-z]+ [a-z]+", span)]
    messages = [m for m in quoted if not m.startswith(("posttrain ", "ray ", "timing_s", "over 95"))]
    assert len(messages) > 20
    for message in messages:
        for part in filter(None, (piece.strip() for piece in message.split("…"))):
            assert part in source, f"{message!r}: {part!r} is in no string of the code"


def test_keys_in_the_guides_are_there() -> None:
    known = {*leaf_keys(), *(key.rsplit(".", 1)[0] for key in leaf_keys())}
    for name in ("troubleshooting.md", "multi-node.md", "from-verl.md"):
        text = (REPO / "docs" / name).read_text(encoding="utf-8").partition("## Keys of RL")[0]
        sections = "|".join(sorted({key.partition(".")[0] for key in known if "." in key}))
        for key in re.findall(rf"`((?:{sections})\.[a-z_]+(?:\.[a-z_]+)*)(?: = [^`]*)?`", text):
            if not key.endswith((".md", ".toml", ".train_batch_size", ".ppo_mini_batch_size")):
                assert key in known or key.startswith(("rollout.engine_options.", "optim.")), f"{name}: {key}"


# ---------------------------------------------------------------------- data and the example


def example_row(kind: str) -> dict[str, Any]:
    text = (REPO / "docs" / "data.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- {kind} -->\n```json\n(.*?)```", text, flags=re.S)
    assert found is not None
    row: dict[str, Any] = json.loads(found[1])
    return row


def test_rows_in_the_docs_can_be_read(tmp_path: Path) -> None:
    write_rows(tmp_path / "rlhf.parquet", [example_row("rlhf")])
    (prompt,) = read_prompts(tmp_path / "rlhf.parquet")
    assert prompt.ground_truth == "11"
    assert prompt.tools_kwargs == {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "11"}}}
    write_rows(tmp_path / "sft.parquet", [example_row("sft")])
    (conversation,) = read_conversations(tmp_path / "sft.parquet")
    assert [m["role"] for m in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    assert conversation.messages[1]["tool_calls"][0]["function"]["arguments"] == {"answer": "11"}
    assert conversation.tools[0]["function"]["name"] == "calc_gsm8k_reward"
    write_rows(tmp_path / "preference.parquet", [example_row("preference")])
    (pair,) = read_preferences(tmp_path / "preference.parquet")
    assert [m["content"].endswith("#### 11") for m in (*pair.chosen, *pair.rejected)] == [True, False]


def test_example_task(tmp_path: Path) -> None:
    """In processes of its own, because a plugin registers names for good."""
    plugin = REPO / "examples" / "my_task.py"
    assert len(plugin.read_text().splitlines()) <= 60
    config = resolve("rl", str(REPO / "examples" / "my_task.toml")).config
    assert config.plugins == ["examples/my_task.py"]
    check_supported(config)

    def posttrain(*args: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(REPO), "COLUMNS": "120"}
        command = [sys.executable, "-m", "posttrain", *args]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)

    done = posttrain("prep", "larger", "--plugin", str(plugin))
    assert done.returncode == 0, done.stderr
    train, test = (read_prompts(tmp_path / "data" / "larger" / f"{split}.parquet") for split in ("train", "test"))
    assert not {p.messages[0]["content"] for p in train} & {p.messages[0]["content"] for p in test}
    (call,) = read_conversations(tmp_path / config.data.train.replace("train.p", "sft_train.p"))[0].messages[1][
        "tool_calls"
    ]
    assert call["function"]["name"] == config.rollout.tools[0] == "larger"

    rows = [
        {
            "data_source": p.data_source,
            "reward_model": {"ground_truth": p.ground_truth},
            "responses": [p.ground_truth, "0"],
        }
        for p in test
    ]
    write_rows(tmp_path / "responses.parquet", rows)
    done = posttrain("eval", "responses.parquet", "--plugin", str(plugin), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sources"]["my/larger"]["pass@1"] == 0.5
    done = posttrain("eval", "responses.parquet")
    assert done.returncode == 2
    assert "no grader for data source 'my/larger'" in done.stderr
