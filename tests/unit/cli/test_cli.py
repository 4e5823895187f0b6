"""The command line as a person meets it: in a process of its own, through exit code, stdout and stderr."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

REPO = Path(__file__).parents[3]
HEAVY = ("torch", "ray", "transformers", "pyarrow", "pandas", "numpy")


def posttrain(*args: str, cwd: Path, program: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPO), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    command = [sys.executable, "-c", program] if program else [sys.executable, "-m", "posttrain"]
    return subprocess.run([*command, *args], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("args", [["--help"], ["presets"], ["sft", "--help"], ["presets", "show", "tiny-gsm8k"]])
def test_start_imports_nothing_heavy(args: list[str], tmp_path: Path) -> None:
    program = (
        "import sys\nfrom posttrain.cli import main\n"
        "try:\n    main()\nfinally:\n"
        f"    print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = posttrain(*args, cwd=tmp_path, program=program)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("command", ["--help", "presets"])
def test_start_costs_little_more_than_its_libraries(command: str, tmp_path: Path) -> None:
    def cpu_seconds(*words: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = {**os.environ, "PYTHONPATH": str(REPO)}
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    libraries = min(cpu_seconds("-c", "import typer, rich.console, pydantic") for _ in range(3))
    ours = min(cpu_seconds("-m", "posttrain", command) for _ in range(3))
    assert ours < 5 * libraries


def test_help_lists_every_command(tmp_path: Path) -> None:
    done = posttrain("--help", cwd=tmp_path)
    commands = "prep sft prefer rl generate eval merge-ckpt quickstart presets version"
    for command in commands.split():
        assert f" {command} " in done.stdout


def test_presets_list_and_show(tmp_path: Path) -> None:
    listed = posttrain("presets", cwd=tmp_path).stdout.splitlines()
    assert any(line.split()[:2] == ["tiny-gsm8k", "rl"] for line in listed)
    shown = posttrain("presets", "show", "tiny-gsm8k", "--provenance", cwd=tmp_path).stdout
    assert "batch_size = 8  # preset tiny-gsm8k" in shown


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        (["sft", "--preset", "tiny-multitrun"], "unknown preset 'tiny-multitrun'", "did you mean 'tiny-multiturn'?"),
        (["sft", "--preset", "tiny-gsm8k"], "is for `posttrain rl`", "tiny-multiturn"),
        (["sft", "--set", "train.lr=1"], "unknown key `train.lr`", "`train.optim.lr`"),
        (["rl", "--algo", "gropo"], "unknown algo 'gropo'", "did you mean 'grpo'?"),
        (["prep"], "which data set?", "arith"),
        (["prep", "arit"], "unknown dataset 'arit'", "did you mean 'arith'?"),
        (["eval"], "no responses.parquet", "posttrain generate"),
        (["eval", "missing.parquet"], "missing.parquet: no such file", "posttrain generate"),
        (["eval", "x", "--pass-at", "five"], "'five'", "--pass-at 1,5"),
        (["eval", "x", "--pass-at", "0"], "eval.pass_at = 0 (flag --pass-at)", ""),
    ],
)
def test_bad_input_exits_2_with_a_hint_and_leaves_nothing(
    args: list[str], error: str, hint: str, tmp_path: Path
) -> None:
    done = posttrain(*args, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert error in done.stderr
    assert not hint or hint in done.stderr.partition("hint: ")[2]
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_usage_error_exits_2(tmp_path: Path) -> None:
    assert posttrain("sft", "--no-such-flag", cwd=tmp_path).returncode == 2
    assert posttrain("frobnicate", cwd=tmp_path).returncode == 2


def test_default_preset_says_so_on_stderr(tmp_path: Path) -> None:
    done = posttrain("sft", "--set", "train.steps=x", cwd=tmp_path)
    assert done.stderr.splitlines()[0] == "no GPU found: using preset tiny-multiturn"


@pytest.mark.parametrize("place", ["before", "after"])
def test_debug_shows_the_traceback(place: str, tmp_path: Path) -> None:
    args = ["eval", "missing.parquet"]
    done = posttrain(*(["--debug", *args] if place == "before" else [*args, "--debug"]), cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        ("ValueError('boom')", 1, "error: ValueError: boom\nhint: run with --debug for the traceback\n"),
        ("KeyboardInterrupt()", 130, "interrupted\n"),
        (
            "posttrain.core.errors.Interrupted('stopped after step 2')",
            130,
            "stopped after step 2; the same command goes on",
        ),
        ("posttrain.core.errors.WorkerError('worker 1 died')", 1, "error: worker 1 died\n"),
    ],
)
def test_exit_code_of_what_a_command_raises(raised: str, code: int, line: str, tmp_path: Path) -> None:
    program = (
        "import posttrain.core.errors\nfrom posttrain.cli import app, guarded\n"
        f"@app.command()\n@guarded\ndef fails() -> None:\n    raise {raised}\n"
        "app(['fails'])"
    )
    done = posttrain(cwd=tmp_path, program=program)
    assert done.returncode == code
    assert done.stderr.startswith(line)
    assert "Traceback" not in done.stderr


def test_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    script = f"{sys.executable} -m posttrain presets show tiny-gsm8k | true"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stderr == ""


def test_eval_takes_the_newest_responses(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "old")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        rows = {
            "data_source": ["openai/gsm8k"],
            "reward_model": [{"style": "rule", "ground_truth": "4"}],
            "responses": [["#### 4", "#### 5"]],
        }
        pq.write_table(pa.table(rows), folder / "responses.parquet")
        os.utime(folder / "responses.parquet", (1e9 - age, 1e9 - age))
    done = posttrain("eval", "--pass-at", "1,2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "evaluating runs/new/responses.parquet",
        "grading runs/new/responses.parquet: 2 responses",
    ]
    result = json.loads(done.stdout)
    assert (result["overall"]["pass@1"], result["overall"]["pass@2"]) == (0.5, 1.0)
    elsewhere = posttrain("eval", "--set", "run.dir=other", cwd=tmp_path)
    assert elsewhere.returncode == 2
    assert "no responses.parquet in the runs under other/" in elsewhere.stderr


def test_prep_arith_prints_what_it_wrote(tmp_path: Path) -> None:
    done = posttrain("prep", "arith", "--out", "d", "--limit", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "d/train.parquet  5 rows" in done.stdout.splitlines()
    assert pq.read_metadata(tmp_path / "d" / "train.parquet").num_rows == 5
    again = posttrain("prep", "arith", "--out", "d", "--limit", "5", cwd=tmp_path)
    assert again.returncode == 2
    assert "--overwrite" in again.stderr


def test_the_driver_does_not_import_what_trains():
    """Two seconds and 100 MB that only workers need."""
    code = (
        "import sys, posttrain.sft.command, posttrain.preference.command\n"
        "import posttrain.rl.command, posttrain.generation.command\n"
        "print([name for name in ('torch.distributed.fsdp', 'torch._dynamo', 'sympy') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
