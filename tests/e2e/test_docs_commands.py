"""Every command in README and docs is run by a test: most of them here, the others by the test that the table names.

A command is shortened where it trains or samples (``SHORTER``), and is otherwise the one in the document.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.tracking.metrics import RENAMED_METRICS
from tests.e2e.run_commands import run_commands

REPO = Path(__file__).resolve().parents[2]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]

FRESH = ["--model", "builtin:tiny"]
SMALL = ["--set", "data.batch_size=2", "--set", "rollout.n=2", "--set", "rollout.max_response_tokens=32"]
ONE_STEP = [*FRESH, *SMALL, "--steps", "1"]
FEW = ["--limit", "4", "--set", "rollout.max_response_tokens=32"]

QWEN2_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "vocab_size": 152064, "num_attention_heads": 28,
    "num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": False,
}  # fmt: skip

HERE: dict[str, list[str]] = {
    "posttrain presets show tiny-gsm8k --provenance": [],
    "posttrain prep --list": [],
    "posttrain prep arith": ["--train-rows", "100", "--test-rows", "20"],
    "posttrain prep arith --tools gsm8k,calculator": ["--train-rows", "20", "--test-rows", "5", "--out", "data/tools"],
    "posttrain prep arith-code": ["--train-rows", "20", "--test-rows", "5"],
    "posttrain prep gsm8k --source path/to/gsm8k": ["--limit", "40"],
    "posttrain prep gsm8k --source path/to/gsm8k --val-fraction 0.05 --decontaminate test --tokenizer builtin:tiny "
    "--out data/clean": ["--limit", "40"],
    "posttrain prep larger --plugin examples/my_task.py": [],
    "posttrain import-verl tests/unit/interop/verl/verl_scripts/gsm8k_grpo.sh": [],
    "posttrain import-verl tests/unit/interop/verl/verl_scripts/sft.sh 8 checkpoints/sft --keys": [],
    "posttrain doctor --quick": [],
    "posttrain plan --preset qwen2.5-0.5b-gsm8k --gpu h200": FRESH,
    "posttrain plan --preset qwen2.5-coder-7b-sft --gpu h100 --gpus 8 --model config.json --length 1200": [],
    "posttrain plan --preset tiny-arith --model builtin:tiny --json": [],
    "posttrain sft --preset tiny-arith-sft --dry-run": [],
    "posttrain sft --preset tiny-arith-sft --name warm --steps 6": [],
    "posttrain sft --preset tiny-arith-sft --name warm --steps 8 --resume runs/warm": [],
    "posttrain sft --preset tiny-arith-sft --name cooler --steps 8 --resume runs/warm/checkpoints/global_step_6 "
    "--set train.optim.lr=1e-4": [],
    "posttrain report warm cooler --out page.html": [],
    "posttrain rl --preset tiny-gsm8k --algo ppo --set critic.optim.lr=1e-5 --set algo.kl_coef=0.01 "
    "--set algo.kl_in=reward": [*ONE_STEP, "--set", "algo.correction.weight=token", "--set", "val.n=2",
                                "--set", "val.limit=2", "--set", "data.val=data/gsm8k/test.parquet"],
    "posttrain rl --preset tiny-gsm8k --replay runs/tiny-gsm8k/rollouts --name again": [*FRESH, "--steps", "1"],
    "posttrain plan --run runs/tiny-gsm8k": [],
    "posttrain rl --preset tiny-gsm8k --tools gsm8k,calculator": [*ONE_STEP, "--name", "tools"],
    "posttrain sft --preset tiny-multiturn --data data/larger/sft_train.parquet --name larger-sft": ["--steps", "2"],
    "posttrain rl --preset examples/my_task.toml --model run:larger-sft": [*SMALL, "--steps", "1"],
    "posttrain generate --preset tiny-generate --plugin examples/my_task.py --tools larger "
    "--data data/larger/test.parquet --name larger": FEW,
    "posttrain eval --plugin examples/my_task.py --pass-at 1,5": [],
    "posttrain generate --preset tiny-arith-generate --model run:tiny-arith --n 5": [*FRESH, *FEW, "--name", "before"],
    "posttrain eval --pass-at 1,5 --failures failures.md": [],
    "posttrain eval --preset tiny-arith-generate --model run:tiny-arith --pass-at 1,5": [
        *FRESH, *FEW, "--name", "after",
    ],
    "posttrain eval --compare runs/before/responses.parquet runs/after/responses.parquet": [],
    "posttrain rl --preset examples/guess.toml --steps 5": [*SMALL, "--steps", "1"],
    "posttrain rl --preset examples/guess.toml --env examples/terminal.py:Terminal --name terminal --steps 5": [
        *SMALL, "--steps", "1",
    ],
    "posttrain eval --preset examples/guess-generate.toml --pass-at 1,4": FEW,
    "posttrain generate --preset examples/guess-generate.toml --set rollout.env= --agent examples/guess.py:play "
    "--name play": FEW,
    "posttrain merge-ckpt tiny-gsm8k --out merged-checked --check": [],
    "posttrain merge-ckpt tiny-gsm8k --out merged-half --dtype bfloat16 --max-shard-size 500MB --check": [],
}  # fmt: skip
"""Command -> how it is made shorter; run in this order, in one folder."""

BY_OTHERS: dict[str, str] = {
    "scripts/quickstart": "e2e/test_pipeline.py:test_quickstart_rl_beats_sft",
    "scripts/test": "what runs this",
    "posttrain prep gsm8k --source DIR": "e2e/test_pipeline.py:test_gsm8k_sequence",
    "posttrain sft --preset tiny-multiturn": "e2e/test_pipeline.py:test_gsm8k_sequence",
    "posttrain rl --preset tiny-gsm8k --algo grpo --tools gsm8k": "e2e/test_pipeline.py:test_gsm8k_sequence",
    "posttrain generate --preset tiny-generate": "e2e/test_pipeline.py:test_gsm8k_sequence",
    "posttrain eval --pass-at 5": "e2e/test_pipeline.py:test_gsm8k_sequence",
    "posttrain report tiny-gsm8k": "e2e/test_pipeline.py:test_gsm8k_sequence",
    "posttrain merge-ckpt tiny-gsm8k --out merged": "e2e/test_pipeline.py:test_gsm8k_sequence",
    "posttrain rl --preset tiny-gsm8k --set train.optim.lr=1e-4 --set rollout.max_turns=2 --name slower --workers 2":
        "e2e/test_training.py:test_steps_do_not_depend_on_workers_and_micro_batches",
    "posttrain rl --preset tiny-gsm8k --algo gspo": "e2e/test_algo_runs.py:test_every_algorithm_takes_its_steps",
    "posttrain rl --preset tiny-arith --plugin examples/my_loss.py --algo dro --set algo.loss_kwargs.beta=0.5":
        "e2e/test_algo_runs.py:test_trains_with_an_algorithm_of_a_plugin_file",
    "posttrain rl --preset tiny-arith --plugin examples/my_advantage.py --set algo.advantage=win_rate":
        "e2e/test_algo_runs.py:test_trains_with_an_algorithm_of_a_plugin_file",
    "posttrain merge-ckpt tiny-lora-sft --out adapter --adapter --check":
        "e2e/test_lora_runs.py:test_the_commands_of_the_guide",
    "posttrain merge-ckpt tiny-gsm8k --out merged-public --check --push my-team/tiny-gsm8k --public":
        "unit/models/test_hub.py:test_what_arrives_is_what_is_written",
    "posttrain sft --preset tiny-code-sft": "e2e/test_code_rl.py:test_rl_with_the_code_interpreter_beats_sft",
    "posttrain rl --preset tiny-code": "e2e/test_code_rl.py:test_rl_with_the_code_interpreter_beats_sft",
    "posttrain generate --preset tiny-code-generate --model run:tiny-code":
        "e2e/test_code_rl.py:test_rl_with_the_code_interpreter_beats_sft",
    "posttrain eval runs/tiny-code-generate/responses.parquet --pass-at 1,5":
        "e2e/test_code_rl.py:test_rl_with_the_code_interpreter_beats_sft",
    "posttrain rl --preset tiny-gsm8k --examine 2":
        "e2e/test_reward_runs.py:test_conversations_are_shown_with_their_parts",
    "posttrain eval --examine 5": "unit/evaluation/test_evaluate.py:test_examined_conversations_go_to_stderr",
    "posttrain generate --preset tiny-generate --tools my_tools.py:word_count":
        "unit/tools/test_tools_page.py:test_the_functions",
    "posttrain rl --preset tiny-gsm8k --replay 'runs/tiny-gsm8k/rollouts/step_00000*.parquet' --name first-nine "
    "--steps 9":
        "e2e/test_replay.py:test_a_replay_from_the_same_start_repeats_the_run",
    "posttrain rl --preset tiny-gsm8k --rollout-only --steps 20 --name samples":
        "e2e/test_replay.py:test_sampling_without_training",
    "posttrain sft --preset tiny-arith-sft --steps 12 --profile 10:12":
        "e2e/test_sft_runs.py:test_traces_and_speed_of_the_steps_asked_for",
    "posttrain import-verl run_grpo.sh --out mine.toml":
        "unit/interop/verl/test_import_verl.py:test_command_writes_a_preset_once",
    "posttrain rl --preset tiny-arith --set rollout.engine=vllm":
        "e2e/test_pipeline.py:test_rl_with_vllm_learns",
    "posttrain generate --endpoint http://127.0.0.1:8000/v1 --model Qwen/Qwen2.5-0.5B-Instruct "
    "--data data/gsm8k/test.parquet":
        "e2e/test_vllm_engine.py:test_generate_by_a_server",
    "ray start --head --port 6379": "e2e/test_multi_node.py:test_the_commands_of_the_guide",
    "ray start --address FIRST:6379": "e2e/test_multi_node.py:test_the_commands_of_the_guide",
    "posttrain doctor --address FIRST:6379": "e2e/test_multi_node.py:test_the_commands_of_the_guide",
    "ray status": "e2e/test_multi_node.py:test_the_commands_of_the_guide",
    "posttrain rl --preset mine.toml --set cluster.address=FIRST:6379 --set cluster.workers=16":
        "e2e/test_multi_node.py:test_the_commands_of_the_guide",
}  # fmt: skip
"""Command -> file:test that runs it, perhaps at another size, in its own process, or against a hub of its own."""
GUIDES = {
    "experts.md": "e2e/test_expert_runs.py",
    "fp8.md": "e2e/test_fp8_runs.py",
    "lora.md": "e2e/test_lora_runs.py",
    "preference.md": "e2e/test_prefer_runs.py",
    "smollm2.md": "e2e/test_smollm2.py",
    "vision.md": "e2e/test_vision_runs.py",
}
"""Pages whose commands are all run by `test_the_commands_of_the_guide` of a file."""
NOT_RUN: dict[str, str] = {
    "sbatch --nodes 4 --gpus-per-node 8 scripts/slurm_rl.sbatch rl --preset mine.toml":
        "needs Slurm, where it was tried by hand; unit/test_slurm_script.py has stand-ins",
    "scripts/install_gpu sglang": "takes several GB; unit/doctor/test_doctor.py checks its versions",
    "source .venv/bin/activate": "the shell's own",
    "posttrain rl --preset qwen2.5-0.5b-gsm8k": "needs a GPU and the model from its hub",
}  # fmt: skip
"""Command -> why no test runs it."""


def snippets() -> Iterator[tuple[str, str]]:
    """(page, command) of each line of a bash block."""
    for page in PAGES:
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.S | re.M):
            for line in block.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    yield page.name, shlex.join(words)


def plain(command: str) -> str:
    return shlex.join(shlex.split(command))


def test_every_command_is_run_by_some_test() -> None:
    known = {plain(command) for command in [*HERE, *BY_OTHERS, *NOT_RUN]}
    shown = {command for page, command in snippets() if page not in GUIDES}
    assert sorted(shown - known) == [], "run it in HERE, or name the test that runs it"
    assert sorted(known - shown - {plain("posttrain prep arith")}) == [], "in no document any more"
    for place in [*BY_OTHERS.values(), *(f"{file}:test_the_commands_of_the_guide" for file in GUIDES.values())]:
        file, _, name = place.partition(":")
        if name:
            assert f"def {name}" in (REPO / "tests" / file).read_text(encoding="utf-8"), place


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, test_data: Path) -> Path:
    """The folder in which the commands of ``HERE`` have run."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("examples", "tests", "presets"):
        (folder / name).symlink_to(REPO / name)
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "gsm8k").symlink_to(test_data / "gsm8k")
    (folder / "config.json").write_text(json.dumps(QWEN2_7B))
    run_commands(folder, [[*shlex.split(command)[1:], *shorter] for command, shorter in HERE.items()])
    return folder


@pytest.mark.slow
def test_they_run_and_write_metrics_that_are_described(ran: Path) -> None:
    described = [re.compile(pattern) for pattern in documented()]
    runs = {file.parent.name: file for file in ran.glob("runs/*/metrics.jsonl")}
    expected = {"warm", "cooler", "tiny-gsm8k", "again", "tools", "larger-sft", "my_task", "guess", "terminal"}
    assert set(runs) == expected
    names = {name for file in runs.values() for line in file.read_text().splitlines() for name in json.loads(line)}
    names = {name for name in names if "/" in name}
    (step,) = map(json.loads, runs["my_task"].read_text().splitlines())
    assert step["rollout/failed"] == step["rollout/grader_failed"] == 0
    assert {
        "critic/vf_loss",
        "correction/weight/mean",
        "val-core/openai/gsm8k/acc/maj@2",
        "actor/reward_kl_penalty",
    } <= names
    missing = sorted(name for name in names if not any(pattern.fullmatch(name) for pattern in described))
    assert missing == [], "docs/metrics.md does not describe these"


# ---------------------------------------------------------------------- docs/metrics.md


def documented() -> list[str]:
    """Regular expressions for the names in the tables of docs/metrics.md; what is in capitals stands for anything."""
    text = (REPO / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*) \|", text, flags=re.M)
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row) if "/" in name]
    stands = re.compile(r"NAME|SOURCE|(?<=@)N\b")
    return [stands.sub(lambda found: r"\d+" if found[0] == "N" else ".+", re.escape(name)) for name in names]


PREFIXES = ("actor", "correction", "critic", "logps", "num_turns", "perf", "prompt_length", "response_length",
         "rewards",
            "rollout", "rollout_gap", "sync", "timing_s", "tools", "train", "val-core")  # fmt: skip


def test_metrics_in_the_code_are_described() -> None:
    patterns = [re.compile(pattern) for pattern in documented()]
    assert len(patterns) > 60
    literal = re.compile(rf"(?:{'|'.join(PREFIXES)})/[a-z_0-9]+(?:/[a-z]+)?")
    missing, source = set(), ""
    for file in (REPO / "posttrain").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        source += text
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and literal.fullmatch(node.value):
                name = RENAMED_METRICS.get(node.value, node.value)
                if not any(p.fullmatch(name) or p.fullmatch(f"{name}/mean") for p in patterns):
                    missing.add(f"{name} ({file.name})")
    assert sorted(missing) == []
    # Of `generate` phases are only shown.
    phases = set(re.findall(r'\.phase\("(\w+)"\)', source)) - {"write"}
    page = (REPO / "docs" / "metrics.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| `timing_s/NAME` \| (.*)$", page, flags=re.M)
    assert set(re.findall(r"`(\w+)`", row)) == phases
    # And nothing is described that the code cannot write.
    for pattern in documented():
        last = re.sub(r"\\(.)", r"\1", pattern).rpartition("/")[2]
        assert ".+" in last or re.search(rf"\b{last.split('@')[0]}\b", source), pattern
