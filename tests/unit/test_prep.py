import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from posttrain import prep
from posttrain.data.parquet import read_conversations, read_prompts
from posttrain.errors import ConfigError, DataError
from posttrain.rewards import compute_score

FILES = ["sft_test.parquet", "sft_train.parquet", "test.parquet", "train.parquet"]


def listing(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_gsm8k_is_complete_and_every_gold_answer_is_right(test_data, tmp_path):
    report = prep.run("gsm8k", str(test_data / "gsm8k"), str(tmp_path / "out"))
    assert report.rows == {
        "train.parquet": 7473,
        "sft_train.parquet": 7473,
        "test.parquet": 1319,
        "sft_test.parquet": 1319,
    }
    assert report.seconds < 10  # 3 s on two free cores
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


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"question": "q", "answer": "no mark"}, "test row 1: `answer`"),
        ({"question": "q", "answer": "#### soon"}, "test row 1: the gold answer is not graded as right"),
        ({"question": " ", "answer": "#### 1"}, "test row 1: `question`"),
        ({"answer": "#### 1"}, "test row 1: `question`"),
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
    heavy = ["torch", "ray", "transformers", "pyarrow", "pandas"]
    code = f"import sys, posttrain.prep; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
