"""`posttrain sft` on GPUs through Ray, on real conversations with the real tokenizer.

Needs `POSTTRAIN_GPU_CHATS` (parquet of SFT rows, as `posttrain prep glaive-toolcall` writes it) and
`POSTTRAIN_GPU_TOKENIZER` (a tokenizer's folder): the machine with the GPU may have no other data.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.gpu.models import HALF_B, write_model

DATA, TOKENIZER = (os.environ.get(f"POSTTRAIN_GPU_{name}", "") for name in ("CHATS", "TOKENIZER"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not (DATA and TOKENIZER), reason="needs POSTTRAIN_GPU_CHATS and POSTTRAIN_GPU_TOKENIZER"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small random model under the real tokenizer."""
    shape = HALF_B | {
        "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4,
    }  # fmt: skip
    return write_model(tmp_path_factory.mktemp("model"), shape, dtype=torch.float32, tokenizer=TOKENIZER)


def start(model, folder, workers, steps):
    settings = {
        "model.path": model, "data.train": DATA, "run.dir": folder, "run.name": "gpu", "cluster.workers": workers,
        "data.max_length": 4096, "data.truncation": "drop", "data.batch_size": 32, "train.steps": steps,
        "train.epochs": 50, "train.optim.lr": 1e-3, "train.tokens_per_microbatch": 8192,
        "cluster.step_deadline_s": 120,
    }  # fmt: skip
    command = [sys.executable, "-m", "posttrain", "sft", "--preset", "tiny-arith-sft"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def metrics(folder):
    file = folder / "gpu" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


@pytest.mark.parametrize("workers", [1, 2])
def test_the_loss_falls(model, tmp_path, workers):
    if torch.cuda.device_count() < workers:
        pytest.skip(f"needs {workers} GPUs")
    process = start(model, tmp_path, workers, 20)
    output = process.communicate(timeout=280)[0]
    assert process.returncode == 0, output[-3000:]
    rows = metrics(tmp_path)
    print(output[-1500:])
    print({k: v for k, v in rows[-1].items() if k.startswith(("perf/", "train/"))})
    assert rows[-1]["train/loss"] < 0.8 * rows[0]["train/loss"]
    assert rows[-1]["perf/padding"] == 0.0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_worker_ends_the_run_and_is_named(model, tmp_path, workers):
    """kill -9 of the last rank: within 60 s, with its name."""
    import psutil

    if torch.cuda.device_count() < workers:
        pytest.skip(f"needs {workers} GPUs")
    process = start(model, tmp_path, workers, 10_000)
    deadline = time.monotonic() + 200
    while len(metrics(tmp_path)) < 3 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.5)
    assert len(metrics(tmp_path)) >= 3
    mine = [p for p in psutil.Process(process.pid).children(recursive=True) if "TrainActor" in " ".join(p.cmdline())]
    assert len(mine) == workers
    mine[-1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    output = process.communicate(timeout=100)[0]
    print(f"ended {time.monotonic() - killed:.1f} s after the kill", output[-600:])
    assert time.monotonic() - killed < 60
    assert process.returncode == 1
    assert "actor worker" in output
