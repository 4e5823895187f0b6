"""What the system says against a file becomes one message with a hint, in every command; nothing half-written stays."""

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from posttrain.cli import app
from posttrain.core.errors import ConfigError, PosttrainError, RunError, explained, presented
from posttrain.core.files import replacing, write_text
from posttrain.core.quiet import quiet_libraries
from posttrain.core.types import Trajectory
from posttrain.data.parquet import write_table
from posttrain.generation.output import ResponseParts, manifest_of, parts_folder
from posttrain.models.builtin import builtin_tokenizer, create_builtin
from posttrain.models.export import export
from posttrain.models.load import ModelSource
from posttrain.rollout.advantage_files import write_advantages
from posttrain.tracking.log import MOST_BYTES, RunLog
from posttrain.tracking.metrics import MetricsFile
from tests.helpers.small_disk import fill, small_disk
from tests.helpers.written_runs import episode, write_run

AGAIN = "then run the same command again"
REPO = Path(__file__).parents[3]


# ---------------------------------------------------------------------- the message


@pytest.mark.parametrize(
    ("number", "kind", "reason", "hint"),
    [
        (errno.ENOSPC, RunError, "no room is left on its disk", f"free some room there, {AGAIN}"),
        (errno.EDQUOT, RunError, "the disk quota is used up", f"free some room, {AGAIN}"),
        (errno.EIO, RunError, "the disk reports an input/output error", f"look at the disk (`dmesg`), {AGAIN}"),
        (errno.EROFS, ConfigError, "its file system is read-only", "choose another --out"),
        (errno.EACCES, ConfigError, "permission denied", "choose another --out"),
        (errno.ENAMETOOLONG, ConfigError, "the name is too long for its file system", "choose another --out"),
    ],
)
def test_an_error_of_the_system_names_file_reason_and_hint(
    number: int, kind: type[PosttrainError], reason: str, hint: str, tmp_path: Path
) -> None:
    path = tmp_path / "made" / "file"
    with pytest.raises(kind) as caught, replacing(path, hint="choose another --out") as temporary:
        temporary.write_text("half")
        raise OSError(number, os.strerror(number))
    assert caught.value.message == f"cannot write {path}: {reason}"
    assert caught.value.hint == hint
    assert list(tmp_path.iterdir()) == []


def test_libraries_that_wrap_an_error_of_the_system_are_seen_through() -> None:
    try:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 576 vs 534")  # noqa: B904
    except RuntimeError as error:
        found = explained(error, "weights.pt")
    assert found is not None
    assert found.message == "cannot write weights.pt: no room is left on its disk"
    rust = explained(Exception("I/O error: No space left on device (os error 28)"), "x.safetensors")
    assert rust is not None
    assert "no room" in rust.message
    assert explained(ValueError("28")) is None
    # What only led to another error is no reason for it.
    with pytest.raises(ValueError, match="no such key") as caught:
        try:
            Path("/nothing/here").read_text()
        except OSError:
            raise ValueError("no such key")  # noqa: B904
    assert presented(caught.value).message == "ValueError: no such key"


def test_who_failed_crosses_processes() -> None:
    error = pickle.loads(pickle.dumps(RunError("gone", hint="look", who="actor worker 1")))
    assert (error.message, error.hint, error.who) == ("gone", "look", "actor worker 1")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("new")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    # A file that is only read on the way is not the one that cannot be written.
    with pytest.raises(FileNotFoundError), replacing(path) as temporary:
        Path("/nothing/here").read_text()
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


# ---------------------------------------------------------------------- full and read-only disks


def noise(rows: int = 400) -> pa.Table:
    return pa.table({"bytes": [os.urandom(1000) for _ in range(rows)]})


def model(folder: Path) -> ModelSource:
    create_builtin("tiny", 0).save_pretrained(folder)
    builtin_tokenizer("tiny").save_pretrained(folder)
    return ModelSource(str(folder))


def scattered() -> Trajectory:
    """An episode whose advantages do not compress."""
    return replace(episode(1, 1.0), advantages=np.random.default_rng(0).standard_normal(100_000).astype(np.float32))


def batch_of_noise(path: Path) -> None:
    with replacing(path) as temporary, temporary.open("wb") as opened:
        torch.save({"ids": torch.randn(100_000)}, opened)


def test_whatever_is_written_to_a_full_disk_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    source = model(tmp_path / "model")
    writers = {
        "text.json": lambda path: write_text(path, "x" * 300_000),
        "step.advantages.arrow": lambda path: write_advantages(path, [[scattered()]]),
        "table.parquet": lambda path: write_table(path, noise()),
        "batch.pt": batch_of_noise,
        "merged": lambda path: export(source, path, overwrite=False),
    }
    with small_disk(tmp_path, "128k") as disk:
        for name, write in writers.items():
            with pytest.raises(RunError) as caught:
                write(disk / name)
            assert caught.value.message == f"cannot write {disk / name}: no room is left on its disk"
            assert caught.value.hint == f"free some room there, {AGAIN}"
            assert list(disk.iterdir()) == [], name
        metrics = MetricsFile(disk)
        fill(disk)
        with pytest.raises(RunError, match=r"cannot write .*metrics\.jsonl: no room"):
            for step in range(1000):
                metrics.write(step, {f"metric/{number}": 1.0 for number in range(100)})
        metrics.close()


def responses(folder: Path) -> Path:
    columns = {
        "data_source": ["openai/gsm8k"] * 200,
        "reward_model": [{"style": "rule", "ground_truth": "4"}] * 200,
        "responses": [[os.urandom(1000).hex()] for _ in range(200)],
        "prompt": [[{"role": "user", "content": "2 + 2?"}]] * 200,
    }
    pq.write_table(pa.table(columns), folder / "responses.parquet")
    return folder / "responses.parquet"


@pytest.mark.parametrize("state", ["full", "read-only"])
def test_commands_that_meet_a_disk_they_cannot_write_to(state: str, tmp_path: Path) -> None:
    file, run = responses(tmp_path), write_run(tmp_path / "runs", "a", [[[episode(1, 1.0), episode(2, 0.0)]]])
    verl = REPO / "tests" / "unit" / "interop" / "verl" / "verl_scripts"
    script = next(verl.rglob("*.sh"))
    with small_disk(tmp_path, "64k") as disk:
        writes = {
            disk / "data": ["prep", "arith", "--train-rows", "1700", "--test-rows", "10", "--out", str(disk / "data")],
            disk / "page.html": ["report", str(run), "--out", str(disk / "page.html")],
            **{
                disk / f"failures.{kind}": ["eval", str(file), "--failures", str(disk / f"failures.{kind}")]
                for kind in ("md", "jsonl", "parquet")
            },
        }
        if state == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            writes[disk / "preset.toml"] = ["import-verl", str(script), "--out", str(disk / "preset.toml")]
        for path, words in writes.items():
            done = CliRunner().invoke(app, words)
            error, hint = [line for line in done.stderr.splitlines() if line.startswith(("error: ", "hint: "))]
            if state == "full":
                assert done.exit_code == 1, done.output
                assert error.startswith(f"error: cannot write {path}"), error
                assert error.endswith(": no room is left on its disk")
                assert hint == f"hint: free some room there, {AGAIN}"
            else:
                assert done.exit_code == 2, done.output
                assert error == f"error: cannot write {path}: its file system is read-only"
                assert "choose another" in hint
            assert list(disk.iterdir()) == [], words


def test_rows_that_were_sampled_stay_when_the_disk_fills_and_go_on_with_overwrite(tmp_path: Path) -> None:
    """The advice is to free room, and not to choose another folder, where no row would be found again."""
    data = tmp_path / "data.parquet"
    pq.write_table(pa.table({"row": range(2000)}), data)
    manifest = manifest_of({"rollout.n": 1}, data, "1") | {"overwrite": True}
    with small_disk(tmp_path, "256k") as disk:
        out = disk / "out.parquet"
        parts = ResponseParts.open(out, manifest, 2000)
        with pytest.raises(RunError) as caught:
            for row in range(0, 2000, 20):
                parts.write([(row + i, [episode(row + i, 1.0, answer=os.urandom(400).hex())]) for i in range(20)])
        parts.close()
        assert caught.value.message.endswith(": no room is left on its disk")
        assert caught.value.hint == f"free some room there, {AGAIN}"
        assert not list(disk.rglob("*.tmp"))
        assert ResponseParts.goes_on(out, manifest)
        assert not ResponseParts.goes_on(out, manifest_of({"rollout.n": 2}, data, "1"))
        again = ResponseParts.open(out, manifest, 2000)
        assert again.done.sum() >= 20
        again.close()
        stored = json.loads((parts_folder(out) / "manifest.json").read_text())
        (parts_folder(out) / "manifest.json").write_text(json.dumps(stored | {"overwrite": False}))
        assert not ResponseParts.goes_on(out, manifest)  # others have begun them


# ---------------------------------------------------------------------- signals, logs, silence


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_any_command_with_a_message_and_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    plugin = tmp_path / "slow.py"
    plugin.write_text(
        "import os, sys, time\n"
        "from posttrain.prep import card\n"
        "def wait(*_):\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    time.sleep(60)\n"
        "card.readme = wait\n"
    )
    words = [
        sys.executable,
        "-m",
        "posttrain",
        "prep",
        "arith",
        "--plugin",
        str(plugin),
        "--out",
        str(tmp_path / "data"),
    ]
    done = subprocess.run(
        [*words, "--train-rows", "10", "--test-rows", "5"],
        capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": str(REPO)},
    )  # fmt: skip
    assert done.returncode == 128 + number, done.stderr
    assert done.stderr.splitlines()[-1] == f"stopped by {number.name}"
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "data").exists()


def test_logs_are_bounded(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "logs")
    log.write("first\x1b[31m")
    assert log.file.read_text().endswith("  first\\x1b[31m\n")
    with log.file.open("a") as file:
        file.writelines(f"line {number:09}\n" for number in range(MOST_BYTES // 15 + 1))
    log.write("last")
    lines = log.file.read_text().splitlines()
    assert log.file.stat().st_size < MOST_BYTES // 2 + 100
    assert lines[0] == "(the beginning was dropped)"
    assert lines[1].startswith("line ")
    assert lines[-1].endswith("  last")


def test_a_process_writes_to_its_log_with_those_that_it_starts(tmp_path: Path) -> None:
    program = (
        "import os, subprocess, sys; from pathlib import Path; from posttrain.tracking.log import *\n"
        "take_over(Path(sys.argv[1])); print('ours', flush=True)\n"
        "subprocess.run(['sh', '-c', 'echo theirs >&2'])\n"
        "shorten(Path(sys.argv[1]), 20); print('after', flush=True)"
    )
    log = tmp_path / "logs" / "worker.log"
    env = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", program, str(log)], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert log.read_text().splitlines()[-2:] == ["theirs", "after"]


@pytest.mark.slow
def test_libraries_are_silent(tmp_path: Path) -> None:
    """Bars of transformers and tqdm, and what torchao says of its kernels."""
    model(tmp_path / "model")
    program = (
        "import sys; from posttrain.core.quiet import quiet_libraries; quiet_libraries()\n"
        "from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "import torchao, tqdm; list(tqdm.tqdm(range(3)))"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TQDM", "HF_"))}
    words = [sys.executable, "-c", program, str(tmp_path / "model")]
    done = subprocess.run(words, capture_output=True, text=True, env=env | {"PYTHONPATH": str(REPO)})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "0")
    quiet_libraries()
    assert os.environ["TQDM_DISABLE"] == "0"
