"""Wrong names, files and rows on the command line: exit code, message, and a hint that puts it right."""

from __future__ import annotations

import codecs
import json
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import Result
from typer.main import get_command
from typer.testing import CliRunner

from posttrain.algos import BUNDLES
from posttrain.cli import COMMANDS, app
from posttrain.config.aliases import ALIASES, NO_KEY
from posttrain.config.describe import READ_BY, described
from posttrain.config.keys import leaf_keys
from posttrain.core.registry import nearest


def posttrain(*args: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, list(args))


def refused(*args: str) -> tuple[str, str]:
    """(message, hint) of a command that ends with exit code 2."""
    done = posttrain(*args)
    assert done.exit_code == 2, done.output
    message, _, hint = done.stderr.partition("hint: ")
    assert "Traceback" not in done.output
    return message, hint.strip()


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "names", "meant"),
    [
        ("gpro", ["gmpo", "grpo", "gspo", "ppo"], "grpo"),  # swapped letters are nearer than a wrong one
        ("gropo", ["gmpo", "grpo", "gspo"], "grpo"),
        ("dr-grpo", ["grpo", "dr_grpo"], "dr_grpo"),
        ("GSM8K", ["gsm8k", "math"], "gsm8k"),
        ("multiturn-tiny", ["tiny-multiturn", "tiny-arith"], "tiny-multiturn"),
        ("zzz", ["grpo", "ppo"], None),
        ("anything", [], None),
    ],
)
def test_the_nearest_name(name: str, names: list[str], meant: str | None) -> None:
    assert nearest(name, names) == meant


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        ("rl --algo gpro", "unknown algo 'gpro'", "did you mean 'grpo'?"),
        ("rl --set algo.name=gpro", "unknown algo 'gpro'", "did you mean 'grpo'?"),
        ("rl --preset tiny-airth", "unknown preset 'tiny-airth'", "did you mean 'tiny-arith'?"),
        ("rl --set rollout.engine=sgalng", "rollout.engine = 'sgalng' (--set)", "did you mean 'sglang'?"),
        ("prep gms8k", "unknown dataset 'gms8k'", "did you mean 'gsm8k'?"),
        ("plan --preset tiny-arith --gpu a1000", "unknown GPU 'a1000'", "did you mean 'a100'?"),
        ("plan --preset tiny-arith --model builtin:tniy", "unknown built-in model", "did you mean 'builtin:tiny'?"),
        ("sft --set learning_rate=1", "unknown key `learning_rate`", "`learning_rate` is called `train.optim.lr` here"),
        ("sft --set train.learnign_rate=1", "unknown key `train.learnign_rate`", "did you mean `train.optim.lr`?"),
        ("rl --set rollout.num_generations=4", "unknown key", "is called `rollout.n` here"),
        ("rl --set trainer.total_epochs=4", "unknown key", "`trainer.total_epochs` is called `train.epochs` here"),
        ("sft --set train.gradient_accumulation_steps=4", "unknown key", "it follows from data.batch_size"),
        ("sft --set data.batch_szie=4", "unknown key `data.batch_szie`", "did you mean `data.batch_size`?"),
    ],
)  # fmt: skip
def test_a_wrong_name_gets_the_right_one(args: str, message: str, hint: str) -> None:
    said, hinted = refused(*args.split())
    assert message in said
    assert hint in hinted


@pytest.mark.parametrize(("args", "meant"), [("gerneate", "generate"), ("presets shwo x", "show"), ("pln", "plan")])
def test_an_unknown_command_gets_the_nearest(args: str, meant: str) -> None:
    done = posttrain(*args.split())
    assert done.exit_code == 2
    assert f"did you mean '{meant}'?" in done.stderr


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        ("rl --stpes 3", "did you mean --steps?"),
        ("sft --lr 1e-5", "did you mean --set train.optim.lr=VALUE?"),
        ("sft --learning-rate=1e-5", "did you mean --set train.optim.lr=VALUE?"),
        ("rl --num-generations 8", "did you mean --set rollout.n=VALUE?"),
        ("doctor --qiuck", "did you mean --quick?"),
    ],
)
def test_an_unknown_option_gets_the_nearest_or_a_key(args: str, hint: str) -> None:
    done = posttrain(*args.split())
    assert done.exit_code == 2
    assert "No such option" in done.stderr
    assert hint in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("prep arith --limit 0", "error: Invalid value for '--limit'"),
        ("prep arith --limit many", "error: Invalid value for '--limit'"),
        ("merge-ckpt --out merged", "error: Missing argument"),
        ("merge-ckpt run", "error: Missing option '--out'"),
        ("report run --out", "error: Option '--out' requires an argument"),
        ("version and more", "error: Got unexpected extra argument"),
    ],
)
def test_words_that_cannot_be_read_lead_to_the_help(args: str, message: str) -> None:
    said, hint = refused(*args.split())
    assert said.startswith(message)
    assert hint.endswith(f"{args.split()[0]} --help")


def test_every_alias_is_of_a_key_and_of_one_only() -> None:
    leaves = set(leaf_keys())
    names = [alias for aliases in ALIASES.values() for alias in aliases]
    assert set(ALIASES) <= leaves
    assert len(names) == len(set(names))
    assert not {*names, *NO_KEY} & {leaf.rpartition(".")[2] for leaf in leaves}
    assert not set(names) & set(NO_KEY)


# ---------------------------------------------------------------------- TOML


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[train]\nsteps = 1\nepochs = 2\nsteps = 3\n", "line 5: the key `steps` is given twice, first on", "keep"),
        ("train.steps = 1\ntrain.steps = 2\n", "line 3: the key `train.steps` is given twice, first on", "keep"),
        ("[data]\ntrain = [\n'a',\n]\ntrain = [\n'b',\n]\n", "line 6: the key `train` is given twice", "keep one"),
        ("[train]\nsteps = 1\n[data]\n[train]\nepochs = 1\n", "line 5: [train] is given twice, first on", "keep"),
        ("train = {steps = 1, steps = 2}\n", "line 2: the key 'steps' is given twice", "keep one"),
        ("[tools]\na = [\n[1, 2],\n]\na = 1\n", "line 6: the key `a` is given twice, first on line 3", "keep"),
        ("[train]\nsteps =\n", "is not valid TOML", "strings need quotes"),
    ],
)  # fmt: skip
def test_a_key_that_is_given_twice_is_named(tmp_path: Path, text: str, message: str, hint: str) -> None:
    (tmp_path / "p.toml").write_text(f'command = "sft"\n{text}')
    said, hinted = refused("sft", "--preset", str(tmp_path / "p.toml"))
    assert message in said
    assert hint in hinted


@pytest.mark.parametrize(
    ("raw", "message", "hint"),
    [
        (codecs.BOM_UTF8 + b'command = "sft"\n', "begins with a byte order mark (BOM)", "without BOM"),
        ('command = "sft"\n'.encode("utf-16"), "is UTF-16, and TOML is UTF-8", "iconv -f UTF-16"),
        (b'command = "sft"\ndescription = "\xe9"\n', "is not UTF-8, in line 2", "iconv"),
    ],
)
def test_a_file_of_another_encoding_is_named(tmp_path: Path, raw: bytes, message: str, hint: str) -> None:
    (tmp_path / "p.toml").write_bytes(raw)
    said, hinted = refused("sft", "--preset", str(tmp_path / "p.toml"))
    assert message in said
    assert hint in hinted


# ---------------------------------------------------------------------- rows of another kind


TALK = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}]
SHAREGPT = [{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}]
PAIR = [{"prompt": TALK[0]["messages"][:1], "chosen": TALK[0]["messages"][1:], "rejected": TALK[0]["messages"][1:]}]
GRADED = [
    {"data_source": "my/own", "prompt": TALK[0]["messages"][:1], "reward_model": {"ground_truth": "4"}}
]  # fmt: skip


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = "".join(json.dumps(row) + "\n" for row in TALK)
    for name in ("talk.jsonl", "lines.parquet"):
        Path(name).write_text(lines)
    Path("list.json").write_text(json.dumps(TALK))
    Path("pairs.csv").write_text("prompt,response\nhi,yo\n")
    Path("completion.jsonl").write_text(json.dumps({"prompt": "hi", "completion": "yo"}))
    Path("graded.jsonl").write_text(json.dumps(GRADED[0]))
    Path("folder").mkdir()
    Path("folder/talk.jsonl").write_text(lines)
    for name, raw in {"talk": TALK, "share": SHAREGPT, "pair": PAIR, "graded": GRADED}.items():
        pq.write_table(pa.Table.from_pylist(raw), f"{name}.parquet")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "file", "hint"),
    [
        ("sft", "talk.jsonl", "prep messages --source talk.jsonl --out data/talk` makes data/talk/sft_train.parquet"),
        ("sft", "list.json", "`posttrain prep messages --source list.json"),
        ("sft", "pairs.csv", "`posttrain prep messages --source pairs.csv"),
        ("sft", "completion.jsonl", "`posttrain prep messages --source completion.jsonl"),
        ("sft", "lines.parquet", "it holds JSON lines: name it lines.jsonl; `posttrain prep messages --source lines"),
        ("sft", "share.parquet", "`posttrain prep messages --source share.parquet"),
        ("sft", "folder", "it has talk.jsonl: `posttrain prep messages --source folder"),
        ("sft", "pair.parquet", "`posttrain prefer --data` trains on such rows"),
        ("sft", "graded.parquet", "`posttrain rl --data` trains on such rows"),
        ("prefer", "talk.jsonl", "a row needs chosen, rejected"),
        ("prefer", "share.parquet", "for `posttrain sft` `posttrain prep messages --source share.parquet"),
        ("rl", "talk.jsonl", "for `posttrain sft` `posttrain prep messages --source talk.jsonl"),
        ("rl", "talk.parquet", "`posttrain sft --data` trains on such rows"),
        ("rl", "share.parquet", "for `posttrain sft` `posttrain prep messages --source share.parquet"),
        ("rl", "graded.jsonl", "posttrain.data.parquet.write_rows"),
        ("rl", "graded.parquet", "DATA_SOURCES['my/own'] = the name of a grader (docs/your-own-task.md)"),
        ("generate", "share.parquet", "a row needs data_source, prompt, reward_model"),
    ],
)  # fmt: skip
def test_rows_of_another_kind_get_the_command_that_takes_them(rows: Path, command: str, file: str, hint: str) -> None:
    _, hinted = refused(command, "--data", file, "--model", "builtin:tiny", "--name", "x")
    assert hint in hinted
    assert not (rows / "runs" / "x").exists()


@pytest.mark.parametrize("file", ["talk.jsonl", "pairs.csv", "share.parquet", "folder"])
def test_the_command_of_the_hint_converts(rows: Path, file: str) -> None:
    _, hinted = refused("sft", "--data", file, "--model", "builtin:tiny")
    command = hinted.split("`")[1]
    done = posttrain(*shlex.split(command)[1:])
    assert done.exit_code == 0, done.stderr
    made = hinted.split(" makes ")[1].split()[0]
    assert pq.read_metadata(made).num_rows == 1


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize("command", ["sft", "prefer", "rl", "generate"])
def test_a_plugin_is_imported_by_every_command_that_runs_a_model(command: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise ValueError('it was imported')")
    message, _ = refused(command, "--plugin", str(tmp_path / "mine.py"), "--model", "builtin:tiny", "--name", "x")
    assert "ValueError: it was imported" in message


def test_tools_none_takes_the_tools_of_a_preset_away(rows: Path) -> None:
    row = {**GRADED[0], "data_source": "openai/gsm8k"}
    pq.write_table(pa.Table.from_pylist([row] * 16), "rl.parquet")
    args = ["rl", "--preset", "tiny-arith", "--data", "rl.parquet", "--model", "builtin:tiny", "--dry-run"]
    assert posttrain(*args, "--tools", "none").exit_code == 0
    message, _ = refused(*args, "--tools", "none,gsm8k")
    assert "unknown tool 'none'" in message


def test_the_help_of_algo_names_the_algorithms() -> None:
    for command in ("rl", "plan"):
        shown = " ".join(posttrain(command, "--help").stdout.replace("│", " ").split())
        assert ", ".join(BUNDLES.names()[:6]) in shown


def test_every_example_is_a_command_that_can_be_read() -> None:
    group = get_command(app)
    for name, (_, example) in COMMANDS.items():
        words = shlex.split(example)
        assert words[:2] == ["posttrain", name]
        command = group.commands[name]  # type: ignore[attr-defined]
        command.make_context(name, words[2:])
        assert f"Example: {words[0]} {words[1]}" in posttrain(name, "--help").stdout


# ---------------------------------------------------------------------- config explain


def test_explain_says_all_of_a_key() -> None:
    done = posttrain("config", "explain", "train.optim.lr", "--preset", "tiny-gsm8k")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "train.optim.lr",
        "  Learning rate after warmup.",
        "  type:      number ≥ 0, ≤ 1",
        "  default:   1e-05",
        "  read by:   sft, prefer, rl",
        "  elsewhere: learning_rate, actor_learning_rate",
        "  in verl:   actor_rollout_ref.actor.optim.lr, optim.lr",
        "  value:     0.0003  (preset tiny-gsm8k)",
    ]


def test_explain_takes_names_of_others_sections_and_entries_of_tables() -> None:
    done = posttrain("config", "explain", "max_new_tokens")
    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, "rollout.max_response_tokens")
    assert "max_new_tokens is called rollout.max_response_tokens here" in done.stderr
    section = posttrain("config", "explain", "train.lora").stdout.splitlines()
    assert [line.split()[0] for line in section][:2] == ["train.lora.rank", "train.lora.alpha"]
    assert posttrain("config", "explain", "tools.search.url").stdout.splitlines()[0] == "tools"
    message, hint = refused("config", "explain", "train.optm.lr")
    assert "unknown key `train.optm.lr`" in message
    assert hint == "did you mean `train.optim.lr`?"


def test_explain_shows_the_table_of_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('command = "rl"\n[reward.weights]\nscore = 1.0\nformat = 0.5\n[tools.find]\ntype = "calculator"\n')
    for key, value in (
        ("reward.weights", '{"score": 1.0, "format": 0.5}  (preset mine)'),
        ("tools", '{"find": {"type": "calculator"}}  (preset mine)'),
        ("reward.function_kwargs", "{}  (default)"),
    ):
        done = posttrain("config", "explain", key, "--preset", str(file))
        assert f"value:     {value}" in done.stdout


@pytest.mark.parametrize(
    ("line", "key", "readers"),
    [
        ("sft --preset tiny-arith-sft --set rollout.n=4 --dry-run", "rollout.n", "rl, generate"),
        ("sft --preset tiny-arith-sft --set generate.limit=3 --dry-run", "generate.limit", "generate"),
        ("prefer --preset tiny-prefer --set tools.find.type=calculator --dry-run", "tools.find.type", "rl, generate"),
        ("generate --preset tiny-generate --set train.optim.lr=1", "train.optim.lr", "sft, prefer, rl"),
        ("sft --preset tiny-arith-sft --set run.traces=false", "run.rollouts", "rl"),
        ("plan --preset tiny-arith-sft --algo ppo", "algo.name", "rl"),
    ],
)
def test_a_key_that_the_command_does_not_read_is_refused(line: str, key: str, readers: str) -> None:
    message, hint = refused(*line.split())
    assert f"{key} is set by --" in message
    assert "does not read it" in message
    assert hint == f"it is read by {readers}"


def test_a_preset_may_serve_several_commands(tmp_path: Path) -> None:
    """Keys of a file that the command does not read are let be."""
    file = tmp_path / "mine.toml"
    file.write_text('extends = "tiny-arith"\n[generate]\nlimit = 3\n')
    assert posttrain("plan", "--preset", str(file), "--set", "rollout.n=2").exit_code == 0


def test_what_is_said_to_read_a_key_is_what_its_description_says() -> None:
    every = list(described())
    assert {one.key for one in every} == set(leaf_keys())
    assert all(any(key == name or key.startswith(f"{name}.") for key in leaf_keys()) for name in READ_BY)
    read_by = {one.key: one.read_by for one in described()}
    for name in ("weights", "on_error", "model.path", "judge.url", "overlong.buffer_tokens"):  # eval refuses these
        assert read_by[f"reward.{name}"] == ("rl",), name
    assert "eval" in read_by["run.console"]
    commands = {"sft", "prefer", "rl", "generate", "eval"}
    for one in every:
        words = one.about.partition(":")[0].replace(",", " ").split()
        named = {word.strip("`") for word in words if word.startswith("`")}
        if words and len(named) == len(words) and named <= commands and one.key != "data.truncation":
            assert named == set(one.read_by), one.key
