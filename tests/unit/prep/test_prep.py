import errno
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from posttrain.core.errors import ConfigError, DataError, ModelError, RunError
from posttrain.data.parquet import read_conversations, read_prompts
from posttrain.prep import command as prep
from posttrain.prep.measure import duplicates
from posttrain.rewards import compute_score

PARQUET = ["sft_test.parquet", "sft_train.parquet", "test.parquet", "train.parquet"]
FILES = sorted(["README.md", *PARQUET, *(f"{name}.card.json" for name in PARQUET)])


def listing(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_gsm8k_is_complete_and_every_gold_answer_is_right(test_data, tmp_path):
    before = time.process_time()
    report = prep.run("gsm8k", str(test_data / "gsm8k"), str(tmp_path / "out"))
    assert time.process_time() - before < 8  # 2 s; of the processor, because others may use it too
    assert report.dropped == {}
    assert report.rows == {
        "train.parquet": 7473,
        "sft_train.parquet": 7473,
        "test.parquet": 1319,
        "sft_test.parquet": 1319,
    }
    assert listing(tmp_path / "out") == FILES
    for split, count in (("train", 7473), ("test", 1319)):
        prompts = read_prompts(tmp_path / "out" / f"{split}.parquet")
        raw = [json.loads(line) for line in (test_data / "gsm8k" / f"{split}.jsonl").read_text().splitlines()]
        assert len(prompts) == len(raw) == count
        for prompt, row in zip(prompts, raw, strict=True):
            assert prompt.messages[-1]["content"] == row["question"]
            score = compute_score(prompt.data_source, row["answer"], prompt.ground_truth, prompt.extra_info)
            assert score.correct
            assert score.score == 1.0
            assert score.error is None
        conversations = read_conversations(tmp_path / "out" / f"sft_{split}.parquet")
        for prompt, conversation in zip(prompts, conversations, strict=True):
            assert conversation.messages[: len(prompt.messages)] == prompt.messages
            assert compute_score(prompt.data_source, conversation.messages[-1]["content"], prompt.ground_truth).correct
            assert "<<" not in conversation.messages[2]["content"]


def test_columns_as_pandas_sees_them(tmp_path):
    prep.run("arith", out=str(tmp_path), train_rows=5, test_rows=3)
    frame = pd.read_parquet(tmp_path / "train.parquet")
    assert list(frame.columns) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert len(frame) == 5
    assert set(frame["reward_model"][0]) == {"style", "ground_truth"}
    assert set(frame["extra_info"][0]) == {"split", "index", "answer", "question", "need_tools_kwargs", "tools_kwargs"}
    assert frame["extra_info"][4]["index"] == 4
    assert len(pd.read_parquet(tmp_path / "sft_test.parquet")) == 3


def test_a_seed_is_refused_by_a_set_that_reads_none(tmp_path):
    source = word_problems(tmp_path / "raw", train=[problem(1)])
    with pytest.raises(DataError, match="gsm8k is read from files, and reads no --seed"):
        prep.run("gsm8k", source, str(tmp_path / "out"), seed=7)
    assert not (tmp_path / "out").exists()


def test_same_seed_same_bytes(tmp_path):
    for name in ("a", "b"):
        prep.run("arith", out=str(tmp_path / name), limit=20, seed=4)
    prep.run("arith", out=str(tmp_path / "c"), limit=20, seed=5)
    a, b, c = ((tmp_path / name / "train.parquet").read_bytes() for name in ("a", "b", "c"))
    assert a == b != c


def test_existing_files_are_kept_unless_overwritten(tmp_path):
    prep.run("arith", out=str(tmp_path), limit=3)
    before = (tmp_path / "train.parquet").read_bytes()
    with pytest.raises(DataError, match="exists already") as error:
        prep.run("arith", out=str(tmp_path), limit=4)
    assert "--overwrite" in (error.value.hint or "")
    assert (tmp_path / "train.parquet").read_bytes() == before
    assert prep.run("arith", out=str(tmp_path), limit=4, overwrite=True).rows["test.parquet"] == 4
    assert listing(tmp_path) == FILES


def test_what_is_read_is_never_replaced(tmp_path):
    prep.run("arith", out=str(tmp_path / "data"), limit=3)
    own = tmp_path / "data" / "sft_train.parquet"
    before = own.read_bytes()
    with pytest.raises(ConfigError, match=r"would replace .*sft_train\.parquet, which"):
        prep.run("messages", str(own), str(tmp_path / "data"), overwrite=True, limit=2)
    other = tmp_path / "data" / "train.parquet"
    with pytest.raises(ConfigError, match=r"would replace .*train\.parquet, which"):
        prep.run("arith", out=str(tmp_path / "data"), overwrite=True, limit=3, decontaminate=[str(other)])
    assert own.read_bytes() == before
    own.rename(other)  # of this name it writes none
    prep.run("messages", str(other), str(tmp_path / "data"), overwrite=True, limit=2)
    assert other.read_bytes() == before


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"question": "q", "answer": "no mark"}, r"test row 1 \(.*test.jsonl, row 1\): `answer`"),
        (
            {"question": "q", "answer": "#### soon"},
            r"test row 1 \(.*test.jsonl, row 1\): the grader cannot judge the gold answer",
        ),
        ({"question": " ", "answer": "#### 1"}, r"test row 1 \(.*test.jsonl, row 1\): `question`"),
        ({"answer": "#### 1"}, r"test row 1 \(.*test.jsonl, row 1\): `question`"),
    ],
)
@pytest.mark.parametrize("existing", [True, False])
def test_a_bad_row_is_named_and_nothing_is_written(tmp_path, bad, message, existing):
    good = {"question": "q", "answer": "#### 1"}
    source = tmp_path / "raw"
    source.mkdir()
    (source / "train.jsonl").write_text(json.dumps(good) + "\n")
    (source / "test.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(bad) + "\n")
    out = tmp_path / "out"
    if existing:
        out.mkdir()
    with pytest.raises(DataError, match=message):
        prep.run("gsm8k", str(source), str(out))
    assert listing(out) == [] if existing else not out.exists()


def test_other_bad_input(tmp_path):
    with pytest.raises(ConfigError, match="unknown dataset") as error:
        prep.run("gsm8")
    assert "gsm8k" in (error.value.hint or "")
    with pytest.raises(DataError, match="--limit must be at least 1"):
        prep.run("arith", out=str(tmp_path / "a"), limit=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="not a folder"):
        prep.run("arith", out=str(tmp_path / "file"), limit=1)
    with pytest.raises(DataError, match="only"):
        prep.run("arith", out=str(tmp_path / "a"), train_rows=10**6)
    assert listing(tmp_path) == ["file"]


def test_prep_needs_no_heavy_library():
    heavy = ["torch", "ray", "transformers", "pyarrow", "pandas", "asyncio", "posttrain.config"]
    code = f"import sys, posttrain.prep.command; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# ---------------------------------------------------------------------- options


def word_problems(folder: Path, **splits: list[dict[str, str]]) -> str:
    """A GSM8K folder."""
    folder.mkdir(exist_ok=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def problem(i: int, answer: str | None = None) -> dict[str, str]:
    return {"question": f"What is {i} and {i} more?", "answer": f"It is {2 * i}.\n#### {answer or 2 * i}"}


def card(folder: Path, file: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / f"{file}.card.json").read_text())
    return value


def test_bad_gold_answers_under_half_a_percent_are_dropped_and_listed(tmp_path):
    rows = [problem(i, "soon" if i == 77 else None) for i in range(201)]
    source = word_problems(tmp_path / "raw", train=rows, test=[problem(i) for i in range(300, 305)])
    report = prep.run("gsm8k", source, str(tmp_path / "out"))
    assert report.rows["train.parquet"] == report.rows["sft_train.parquet"] == 200
    assert report.dropped == {"the grader cannot judge the gold answer": 1}
    assert 77 not in [p.extra_info["index"] for p in read_prompts(tmp_path / "out" / "train.parquet")]
    for file in ("train.parquet", "sft_train.parquet"):
        (dropped,) = card(tmp_path / "out", file)["dropped"]
        assert dropped["rows"] == [77]
        assert "What is 77" in dropped["examples"][0]
        assert card(tmp_path / "out", file)["read"] == 201
    assert "Dropped: 1 rows: the grader cannot judge the gold answer" in (tmp_path / "out" / "README.md").read_text()
    rows[78] = problem(78, "later")
    source = word_problems(tmp_path / "raw", train=rows)
    with pytest.raises(DataError, match=r"train row 77 .*: the grader cannot judge the gold answer") as error:
        prep.run("gsm8k", source, str(tmp_path / "out"), overwrite=True)
    assert "2 of 201 rows" in (error.value.hint or "")
    assert card(tmp_path / "out", "train.parquet")["rows"] == 200


def test_rows_keep_order_and_number_over_several_batches(tmp_path):
    bad = [0, 1023, 1024, 2099]
    rows = [problem(i, "soon" if i in bad else None) for i in range(2100)]
    prep.run("gsm8k", word_problems(tmp_path / "raw", train=rows), str(tmp_path / "out"))
    (dropped,) = card(tmp_path / "out", "train.parquet")["dropped"]
    assert dropped["rows"] == bad
    assert "row 1024: " in dropped["examples"][2]
    assert "What is 1024 and" in dropped["examples"][2]
    kept = [p.extra_info["index"] for p in read_prompts(tmp_path / "out" / "train.parquet")]
    assert kept == [i for i in range(2100) if i not in bad]
    conversations = read_conversations(tmp_path / "out" / "sft_train.parquet")
    assert [c.messages[1]["content"] for c in conversations] == [rows[i]["question"] for i in kept]


def test_half_a_percent_itself_is_too_much(tmp_path):
    source = word_problems(tmp_path / "raw", train=[problem(i, "soon" if i == 3 else None) for i in range(200)])
    with pytest.raises(DataError, match="train row 3"):
        prep.run("gsm8k", source, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_one_split_and_then_the_other(tmp_path):
    out = tmp_path / "out"
    assert list(prep.run("arith", out=str(out), limit=4, splits=["train"]).rows) == [
        "train.parquet",
        "sft_train.parquet",
    ]
    assert list(prep.run("arith", out=str(out), limit=3, splits=["test"]).rows) == ["test.parquet", "sft_test.parquet"]
    assert listing(out) == FILES
    page = (out / "README.md").read_text()
    for file in PARQUET:
        assert f"## {file}" in page
    with pytest.raises(DataError, match="no split 'tset'") as error:
        prep.run("arith", out=str(out), splits=["tset"])
    assert error.value.hint == "did you mean 'test'?"


def test_a_val_split_by_hash_of_the_prompt(tmp_path):
    rows = [problem(i) for i in range(300)]
    source = word_problems(tmp_path / "raw", train=[*rows, problem(7)], test=[problem(300), problem(301)])
    report = prep.run("gsm8k", source, str(tmp_path / "a"), val_fraction=0.2)
    sides = {
        side: {p.messages[-1]["content"] for p in read_prompts(tmp_path / "a" / f"{side}.parquet")}
        for side in ("train", "val")
    }
    assert not sides["train"] & sides["val"]
    assert report.rows["train.parquet"] + report.rows["val.parquet"] == 301
    assert 30 < report.rows["val.parquet"] < 90  # 60 in the mean, standard deviation 7
    asked = [c.messages[-4]["content"] for c in read_conversations(tmp_path / "a" / "sft_val.parquet")]
    assert set(asked) == sides["val"]
    assert card(tmp_path / "a", "val.parquet")["split"] == "train"
    # Neither the order nor the other rows decide where a prompt falls.
    word_problems(tmp_path / "raw", train=rows[::-2])
    prep.run("gsm8k", source, str(tmp_path / "b"), val_fraction=0.2)
    fewer = {p.messages[-1]["content"] for p in read_prompts(tmp_path / "b" / "val.parquet")}
    assert fewer == sides["val"] & {row["question"] for row in rows[::-2]}
    with pytest.raises(DataError, match="leaves one side empty"):
        prep.run("gsm8k", source, str(tmp_path / "c"), limit=2, val_fraction=1e-6)
    with pytest.raises(DataError, match=r"must be in \[0, 1\)"):
        prep.run("gsm8k", source, str(tmp_path / "c"), val_fraction=1.0)
    with pytest.raises(DataError, match="not prepared"):
        prep.run("gsm8k", source, str(tmp_path / "c"), splits=["test"], val_fraction=0.1)
    assert not (tmp_path / "c").exists()


LONG = "A farmer has {} cows and buys {} more at the market on the last Monday of the month. How many cows are there?"


def test_training_rows_that_overlap_an_evaluation_set_are_reported_and_dropped(tmp_path):
    test = [{"question": LONG.format(i, i), "answer": f"#### {2 * i}"} for i in range(3)]
    train = [problem(i) for i in range(20)]
    train[4] = {"question": "Once more! " + LONG.format(2, 2).upper(), "answer": "#### 4"}
    train[9] = {"question": LONG.format(1, 1), "answer": "#### 2"}
    source = word_problems(tmp_path / "raw", train=train, test=test)
    prep.run("gsm8k", source, str(tmp_path / "all"))
    (overlap,) = card(tmp_path / "all", "train.parquet")["overlaps"]
    assert (overlap["evaluation"], overlap["rows"]) == ("test", 2)
    assert overlap["examples"][0].startswith("row 4 and its row ")
    assert card(tmp_path / "all", "test.parquet")["overlaps"] == []
    files = [str(tmp_path / "all" / "test.parquet"), str(tmp_path / "all" / "sft_test.parquet")]
    for i, drop in enumerate([["test"], files[:1], files[1:]]):
        out = tmp_path / f"clean{i}"
        report = prep.run("gsm8k", source, str(out), decontaminate=drop)
        assert report.dropped == {f"overlaps {drop[0]}": 2}
        assert report.rows == {"train.parquet": 18, "sft_train.parquet": 18, "test.parquet": 3, "sft_test.parquet": 3}
        (dropped,) = card(out, "sft_train.parquet")["dropped"]
        assert dropped["rows"] == [4, 9]
        assert "a farmer has" in dropped["examples"][1]
        assert {o["evaluation"]: o["rows"] for o in card(out, "train.parquet")["overlaps"]} == dict.fromkeys(
            ["test", *drop], 0
        )


def test_decontamination_against_nothing_that_is_there(tmp_path):
    source = word_problems(tmp_path / "raw", train=[problem(1)], test=[problem(2)])
    (tmp_path / "x.parquet").write_text("no")
    for name, message in (("tset", "no such file"), (str(tmp_path / "x.parquet"), "not a readable parquet file")):
        with pytest.raises(DataError, match=message):
            prep.run("gsm8k", source, str(tmp_path / "out"), decontaminate=[name])
    with pytest.raises(DataError, match="every row of split 'train' overlaps"):
        prep.run("gsm8k", source, str(tmp_path / "out"), decontaminate=["train"])
    assert not (tmp_path / "out").exists()


def test_tools_go_into_both_kinds_of_rows(tmp_path):
    prep.run("arith", out=str(tmp_path), limit=3, tools=["gsm8k"])
    prompt = read_prompts(tmp_path / "train.parquet")[0]
    assert prompt.tools_kwargs == {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": prompt.ground_truth}}}
    conversation = read_conversations(tmp_path / "sft_train.parquet")[0]
    assert [tool["function"]["name"] for tool in conversation.tools] == ["calc_gsm8k_reward"]
    with pytest.raises(ConfigError, match="unknown tool 'gsm8'"):
        prep.run("arith", out=str(tmp_path / "b"), tools=["gsm8"])


def test_a_template_that_must_render_every_row(tmp_path):
    template = tmp_path / "t.jinja"
    shows = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    template.write_text(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    )
    source = word_problems(tmp_path / "raw", train=[problem(1)], test=[problem(2)])
    with pytest.raises(DataError, match=r"sft_train.parquet: row 0: the chat template refuses .* no tools"):
        prep.run("gsm8k", source, str(tmp_path / "out"), template=str(template))
    assert not (tmp_path / "out").exists()
    for broken in ("'' + m", "bos_token + ''"):
        template.write_text(f"{{% for m in messages %}}{{{{ {broken} }}}}{{% endfor %}}")
        with pytest.raises(DataError, match=r"train.parquet: row 0: the chat template refuses .*") as error:
            prep.run("gsm8k", source, str(tmp_path / "out"), template=str(template))
        assert "--tokenizer MODEL" in str(error.value.hint)
    template.write_text(shows)
    prep.run("gsm8k", source, str(tmp_path / "out"), template=str(template))
    (prompt,) = read_prompts(tmp_path / "out" / "train.parquet")
    shown = "".join(f"[{m['role']}]{m['content']}" for m in prompt.messages) + "[assistant]"
    lengths = card(tmp_path / "out", "train.parquet")["lengths"]
    assert lengths["prompt in the chat template, characters"]["p50"] == len(shown)
    with pytest.raises(DataError, match="no such file"):
        prep.run("gsm8k", source, str(tmp_path / "b"), template="none.jinja")


@pytest.mark.parametrize("flag", ["template", "tokenizer"])
def test_a_model_that_is_not_there_is_told_with_its_option(tmp_path, flag):
    with pytest.raises(ModelError, match=rf"^--{flag}: model folder not found: \./nope") as refused:
        prep.run("arith", out=str(tmp_path / "out"), **{flag: "./nope"})
    assert "--model" not in refused.value.hint


@pytest.mark.parametrize("flag", ["template", "tokenizer"])
def test_lengths_in_tokens(tmp_path, flag):
    from posttrain.data.chat import render_chat, render_prompt
    from posttrain.models.builtin import builtin_tokenizer

    prep.run("arith", out=str(tmp_path), limit=5, **{flag: "builtin:tiny"})
    tokenizer = builtin_tokenizer("tiny")
    prompts = sorted(len(render_prompt(p.messages, tokenizer)) for p in read_prompts(tmp_path / "train.parquet"))
    lengths = card(tmp_path, "train.parquet")["lengths"]["prompt in the chat template, tokens"]
    assert (lengths["p0"], lengths["p50"], lengths["p100"]) == (prompts[0], prompts[2], prompts[4])
    rows = read_conversations(tmp_path / "sft_train.parquet")
    lengths = card(tmp_path, "sft_train.parquet")["lengths"]["conversation in the chat template, tokens"]
    assert lengths["p100"] == max(len(render_chat(r.messages, tokenizer, r.tools).ids) for r in rows)


# ---------------------------------------------------------------------- cards


def test_the_card_says_what_the_file_is(test_data, tmp_path):
    source = test_data / "gsm8k"
    prep.run("gsm8k", str(source), str(tmp_path), limit=50)
    known = card(tmp_path, "sft_train.parquet")
    file = tmp_path / "sft_train.parquet"
    assert known["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    raw = {name: hashlib.sha256((source / name).read_bytes()).hexdigest() for name in ("train.jsonl", "test.jsonl")}
    assert known["source"] == {"given": str(source), "hub_id": "openai/gsm8k", "files": raw}
    assert (known["rows"], known["read"], known["licence"], known["kind"]) == (50, 50, "MIT", "sft")
    assert known["options"] == {"limit": 50}
    assert card(tmp_path, "train.parquet")["data_sources"] == {"openai/gsm8k": 50}
    words = known["lengths"]["conversation, words"]
    assert words["p0"] <= words["p5"] <= words["p50"] <= words["mean"] * 2 <= words["p100"] * 2


def test_duplicates_are_counted_and_kept(tmp_path):
    rows = [problem(1), problem(2), problem(1), {**problem(2), "question": "what is 2, and 2 MORE"}, problem(3)]
    rows.append({**problem(3), "answer": "Three and three.\n#### 6"})
    source = word_problems(tmp_path / "raw", train=rows)
    assert prep.run("gsm8k", source, str(tmp_path / "out")).rows == {"train.parquet": 6, "sft_train.parquet": 6}
    found = card(tmp_path / "out", "train.parquet")["duplicates"]
    assert found == {"exact": 2, "normalised": 3, "examples": [[2, 0], [3, 1], [5, 4]]}
    # Another solution of the same problem is no duplicate to imitate.
    assert card(tmp_path / "out", "sft_train.parquet")["duplicates"]["examples"] == [[2, 0], [3, 1]]


def test_the_same_words_about_another_image_are_no_duplicate():
    assert duplicates(["q A", "q A", "q B", "q B"], ["q"] * 4) == (2, [(1, 0), (3, 2)])


def test_a_readme_of_the_users_own_is_never_replaced(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(DataError, match="prep did not write it"):
            prep.run("arith", out=str(tmp_path), limit=2, overwrite=overwrite)
    assert listing(tmp_path) == ["README.md"]


def test_what_was_there_comes_back_when_a_file_cannot_be_moved(tmp_path, monkeypatch):
    prep.run("arith", out=str(tmp_path), limit=2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    real = os.replace

    def full(source, target):
        if Path(target) == tmp_path / "train.parquet" and "old" not in str(source):
            raise OSError(errno.ENOSPC, "no space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RunError, match="no room is left on its disk"):
        prep.run("arith", out=str(tmp_path), limit=3, overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_list_names_what_a_person_chooses_by():
    listed = {row[0]: row[1:] for row in prep.listing()}
    assert listed["gsm8k"] == ("MIT", "train 7,473, test 1,319", "train, test", "gsm8k", "rlhf, sft")
    assert listed["arith"][1] == "any"


def test_the_list_is_lines_in_a_pipe_and_a_table_on_a_terminal(capsys, monkeypatch):
    prep.print_list()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t") for line in lines] == [list(row) for row in prep.listing()]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    prep.print_list()
    table = capsys.readouterr().out
    assert "licence" in table
    assert "│" in table


def test_the_command_line_passes_every_option_on(tmp_path):
    from typer.testing import CliRunner

    from posttrain.cli import app

    source = word_problems(tmp_path / "raw", train=[problem(i) for i in range(60)], test=[problem(3)])
    words = ["prep", "gsm8k", "--source", source, "--out", str(tmp_path / "out"), "--limit", "50", "--split", "train"]
    words += ["--val-fraction", "0.3", "--tools", "gsm8k", "--decontaminate", "test", "--template", "builtin:tiny"]
    words += ["--demos", "calculator"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "1 rows dropped: overlaps test" in done.stderr
    known = card(tmp_path / "out", "val.parquet")
    assert known["options"] == {
        "limit": 50,
        "splits": ["train"],
        "template": "builtin:tiny",
        "tools": ["gsm8k"],
        "demos": "calculator",
        "val_fraction": 0.3,
        "decontaminate": ["test"],
    }
    assert not (tmp_path / "out" / "test.parquet").exists()


def test_evaluation_sets_beside_the_source_are_compared_and_can_be_named(tmp_path):
    def row(i: int, text: str = "Compute") -> dict[str, str]:
        problem = f"{i}. {text} the sum of the first positive whole numbers not exactly divisible by {i + 1}."
        return {"problem": problem, "solution": f"It is $\\boxed{{{i}}}$.", "answer": str(i), "level": "1", "type": "a"}

    source = tmp_path / "raw"
    word_problems(source, math_train=[row(i) for i in range(2, 30)], math_test=[row(i, "Find") for i in range(90, 95)])
    word_problems(source, math500=[row(7, "Determine")], kk=[{"quiz": "?"}])
    prep.run("math", str(source), str(tmp_path / "all"))
    overlaps = {o["evaluation"]: o["rows"] for o in card(tmp_path / "all", "train.parquet")["overlaps"]}
    assert overlaps == {"test": 0, "math500": 1}
    report = prep.run("math", str(source), str(tmp_path / "clean"), decontaminate=["math500"])
    assert report.dropped == {"overlaps math500": 1}
    assert report.rows["train.parquet"] == 27
