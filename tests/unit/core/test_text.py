"""Text of data, models and configs, where a terminal, rich or Markdown would obey it."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from posttrain.cli import app
from posttrain.core.text import has_login, markdown, markdown_block, markdown_code, printable
from posttrain.prep import card

EVIL = ["[/b]", "[bold red]x[/]", "\x1b]0;title\x07", "a\nb\r\x9bc", "\u202eright to left", "x | y `z` <b>&amp;"]
OBEYED = set("\x1b\x07\r\x9b\u202e\x00\x08")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:secret@host:8080/v1", "http://***@host:8080/v1"),
        (
            "no answer of https://token@host/x, see http://host/@me",
            "no answer of https://***@host/x, see http://host/@me",
        ),
        ("{'url': 'http://u:p@h', 'mail': 'a@b'}", "{'url': 'http://***@h', 'mail': 'a@b'}"),
        ("postgresql+x://u:p%40q@h/db", "postgresql+x://***@h/db"),
        ("http://u:se/cret@host", "http://***@host"),
        ("http://u:a@b@host", "http://***@host"),
        ("http://127.0.0.1:8000/v1/@x and a@b.c", "http://127.0.0.1:8000/v1/@x and a@b.c"),
    ],
)
def test_logins_in_urls_are_not_shown(text, shown):
    assert printable(text) == shown
    assert has_login(text) == (text != shown)


@pytest.mark.parametrize("text", EVIL)
def test_markdown_shows_text_as_it_is(text):
    for made in (markdown(text), markdown_code(text)):
        assert "\n" not in made
        assert not OBEYED & set(made)
    assert "<" not in markdown(text).replace("\\<", "")
    assert not OBEYED & set(markdown_block(text))
    block = markdown_block(f"{text}\n````\n# no heading").splitlines()
    assert block[0] == "`````text"
    assert block[-1] == "`````"
    assert "`````" not in "".join(block[1:-1])


def responses(folder, name, right):
    """A file whose data sources and levels are what a terminal or rich would obey."""
    path = folder / name
    pq.write_table(
        pa.table({
            "data_source": ["openai/gsm8k"] * len(EVIL),
            "reward_model": [{"style": "rule", "ground_truth": "4"}] * len(EVIL),
            "responses": [[f"#### {4 if right else 5} {text}"] for text in EVIL],
            "extra_info": [{"level": text, "index": i} for i, text in enumerate(EVIL)],
            "prompt": [[{"role": "user", "content": text}] for text in EVIL],
        }),
        path,
    )  # fmt: skip
    return path


def test_eval_shows_and_stores_levels_as_they_are(tmp_path):
    file, failures = responses(tmp_path, "[b]\x1bwrong.parquet", right=False), tmp_path / "failures.md"
    done = CliRunner().invoke(app, ["eval", str(file), "--failures", str(failures), "--examine", "1"])
    assert done.exit_code == 0, done.output
    for shown in (done.stdout, done.stderr, failures.read_text()):
        assert not OBEYED & set(shown)
    assert "[/b]" in done.stdout
    assert "[bold red]x[/]" in done.stdout
    assert "\\x1b]0;title\\x07" in done.stdout
    assert "a\\x0ab\\x0d\\x9bc" in done.stdout
    headings = [line for line in failures.read_text().splitlines() if line.startswith("## ")]
    assert len(headings) == len(EVIL)
    assert headings[0] == "## Row 0: openai/gsm8k, level \\[/b\\], 0 of 1 right"


def test_a_comparison_shows_names_as_they_are(tmp_path, monkeypatch):
    from posttrain.rewards import DATA_SOURCES

    for text in EVIL:
        monkeypatch.setitem(DATA_SOURCES, text, "gsm8k")
    files = []
    for name, right in (("[red].parquet", True), ("\x1b[2Jb.parquet", False)):
        table = pq.read_table(responses(tmp_path, name, right))
        pq.write_table(table.set_column(0, "data_source", pa.array(EVIL)), tmp_path / name)
        files.append(str(tmp_path / name))
    done = CliRunner().invoke(app, ["eval", "--compare", *files])
    assert done.exit_code == 0, done.output
    assert not OBEYED & set(done.output)
    for text in ("[/b]", "[red].parquet", "\\x1b[2Jb.parquet"):
        assert text in done.stdout


def test_errors_are_shown_without_what_a_terminal_obeys(tmp_path):
    done = CliRunner().invoke(app, ["eval", str(tmp_path / "no\x1b[2Jfile")])
    assert done.exit_code == 2
    assert "\\x1b[2J" in done.stderr
    assert not OBEYED & set(done.output)


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2J", "\u202ea", "a\x00b", "..", "a/b", "x\udcff"])
@pytest.mark.parametrize("command", ["sft", "generate"])
def test_a_run_has_a_name_that_can_be_shown(tmp_path, command, name):
    done = CliRunner().invoke(app, [command, "--name", name, "--set", f"run.dir={tmp_path / 'runs'}"])
    assert done.exit_code == 2
    assert "error: run.name = " in done.stderr
    assert "run.name is set by: flag --name" in done.stderr
    assert not OBEYED & set(done.output)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "sets",
    [
        ["sandbox.mode=remote", "sandbox.url=http://me:secret@host:8080"],
        ["reward.judge.url=http://me:secret@host/v1", "reward.judge.model=x", "reward.weights.judge=1.0"],
        ["tools.find={type='search', url='http://me:secret@host'}", "rollout.tools=['find']"],
        ["tools.find={type='mcp', command=['server', '--proxy=http://me:secret@host']}"],
        ["rollout.interaction_options={server='https://secret@host'}", "rollout.interaction=retry"],
        ["model.path=https://me:secret@host/model"],
    ],
)
def test_a_login_in_a_url_is_neither_stored_nor_shown(tmp_path, sets):
    flags = [word for text in sets for word in ("--set", text)]
    done = CliRunner().invoke(app, ["rl", "--preset", "tiny-arith", "--set", f"run.dir={tmp_path / 'runs'}", *flags])
    assert done.exit_code == 2
    assert "a URL holds a user or a password" in done.stderr
    assert "secret" not in done.output
    assert not (tmp_path / "runs").exists()


def test_the_preset_of_a_script_with_a_login_is_without_it(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo reward_model.sandbox_fusion.url=http://me:secret@host/run_code "
        "data.train_files=x.parquet\n"
    )
    done = CliRunner().invoke(app, ["import-verl", str(script), "--out", str(tmp_path / "p.toml")])
    assert done.exit_code == 2
    assert "sandbox.url: a URL holds a user or a password" in done.stderr
    assert "secret" not in done.output
    assert 'url = "http://***@host"' in (tmp_path / "p.toml").read_text()  # to be put right


def test_a_card_shows_names_and_examples_as_they_are():
    made = card.Card(
        file="train.parquet", kind="rlhf", dataset="x`y", split="train", licence="[MIT](http://x) | <b>", rows=1,
        sha256="0" * 64, read=1, data_sources={"a|b\n# c": 1}, skipped={"<script>": 2},
        dropped=[card.dropped("no *answer*", [(0, "row \x1b[2J\n\n# heading <img src=x>")])], lengths={},
        duplicates=card.Duplicates(exact=0, normalised=0, examples=[]),
        overlaps=[card.Overlaps(evaluation="[x](y)", rows=0, examples=[])],
        source=card.Source(given="`/tmp`", hub_id=None, files={}), options={}, version="0",
    )  # fmt: skip
    page = card.readme([made])
    assert not OBEYED & set(page)
    assert "<" not in page.removeprefix(card._MADE).replace("\\<", "")
    assert [line for line in page.splitlines() if line.startswith("#")] == ["# x\\`y", "## train.parquet"]
    (row,) = (line for line in page.splitlines() if line.startswith("| `train.parquet`"))
    assert row.replace("\\|", "").count("|") == 8
    assert "\\[MIT\\](http://x) \\| \\<b\\>" in row
    assert json.loads(made.model_dump_json())["dataset"] == "x`y"  # what is for programs stays as it is
