"""Run the GPU tests and benchmarks of this repository side by side on the GPUs of this machine, each with a time limit.

    python scripts/gpu_jobs.py --list
    python scripts/gpu_jobs.py --out /tmp/gpu --limit 540 sglang-start sglang-rl rl-lora
    python scripts/gpu_jobs.py --out /tmp/gpu training            a whole group

Jobs start in the order given, as soon as enough GPUs are free. Logs go into `--out`; of each job the rows that it
printed, its errors and its last lines are shown at the end. `POSTTRAIN_GPU_TOKENIZER`, `POSTTRAIN_GPU_CHATS`,
`POSTTRAIN_GPU_GSM8K` and `POSTTRAIN_GPU_SMOLLM2` say where a tokenizer, conversations, and what `posttrain prep gsm8k`
and `scripts/smollm2.py` wrote are.
Jobs side by side also share the host, which slows what waits for it: run alone what is to be timed.
The engines' jobs share what `gpu_model.py` trains (a minute and a half, once a machine).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Job:
    """A command with GPUs of its own."""

    name: str
    command: tuple[str, ...]
    gpus: int = 1
    limit_s: float = 300.0
    env: Mapping[str, str] = field(default_factory=dict)


def _test(name: str, file: str, select: str, *, gpus: int = 1, limit_s: float = 300.0, **env: str) -> Job:
    options = ("-o", "addopts=", "-o", "asyncio_mode=auto", "-p", "no:cacheprovider", "-q", "-s", "-m", "gpu")
    return Job(
        name, (sys.executable, "-m", "pytest", *options, f"tests/gpu/{file}.py", "-k", select), gpus, limit_s, env
    )


def _bench(name: str, text: str, *, gpus: int = 1, limit_s: float = 300.0) -> Job:
    return Job(name, (sys.executable, *text.split()), gpus, limit_s)


_QUICK_START = {
    # Without torch.compile and tuning vLLM starts in seconds, and without graphs of prefills SGLang does. Benchmarks
    # compare with the same engine by itself, so they can do with that.
    "vllm": json.dumps({"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}),
    "sglang": json.dumps({"disable_prefill_cuda_graph": True, "cuda_graph_max_bs_decode": 256}),
}


def _engine(engine: str) -> list[Job]:
    quick = _QUICK_START[engine]
    env = {"POSTTRAIN_GPU_ENGINE": engine, "POSTTRAIN_GPU_ENGINE_OPTIONS": quick}
    bench = ("scripts/bench_rollout_gpu.py", "--engine", engine, "--updates", "3", "--options", quick, "--shape")
    apart = ("7b", "--new", "1536", "--requests", "64", "--placement", "separate")
    gap = ("scripts/bench_gap_gpu.py", "--engine", engine, "--options", quick)

    def measure(name: str, *command: str, gpus: int = 1, limit_s: float = 300.0) -> Job:
        return Job(f"{engine}-{name}", (sys.executable, *command), gpus, limit_s)

    return [
        measure("gap", *gap, limit_s=420),
        measure("0.5b", *bench, "0.5b", limit_s=240),
        measure("7b", *bench, "7b", "--new", "256", limit_s=330),
        _test(f"{engine}-rl", "test_engines_gpu", "in_turns_for", limit_s=400, **env),
        _test(f"{engine}-kill", "test_engines_gpu", "killed", limit_s=240, **env),
        measure("7b-tp2", *bench, "7b", "--tensor-parallel", "2", "--new", "256", gpus=2, limit_s=300),
        measure("7b-apart", *bench, *apart, gpus=2, limit_s=240),
        _test(f"{engine}-two", "test_engines_gpu", "two_gpus or from_gpu", gpus=2, limit_s=300, **env),
    ]


def _fp8(name: str, engine: str, *more: str) -> Job:
    """7B in bfloat16 and in FP8, with few requests and with those of a step of 64 x 16. An engine starts in two to four
    minutes, with kernels that are compiled."""
    bench = ("scripts/bench_rollout_gpu.py", "--engine", engine, "--shape", "7b", "--fp8", "--updates", "2")
    work = ("--requests", "64", "256", "1024", "--new", "256", "--memory-fraction", "0.6")
    return Job(name, (sys.executable, *bench, *work, *more), limit_s=600)


_TRITON = ("--fp8-options", json.dumps({"fp8_gemm_runner_backend": "triton"}))
_FEW_GRAPHS = json.dumps({"disable_prefill_cuda_graph": True, "cuda_graph_bs_decode": [1, 16, 64, 256, 512, 1024]})
_REPLAY = "scripts/bench_rollout_gpu.py --shape 7b-a1b --router-replay --new 256 --requests 64 --engine"
_ADAPTERS = "scripts/bench_train.py rows --shape 30b-a3b --weights random --lora-rank 32 --checkpointing full"
_SHARDS = "scripts/bench_train.py shards --shape 7b --steps 4 --gather step"
_LONG = f"{_SHARDS} --length 32768 --tokens-per-microbatch 32768"
_CHECK = (
    "scripts/bench_gpu.py --parts sft rl --steps 6 "
    f"--tokenizer {os.environ.get('POSTTRAIN_GPU_TOKENIZER', 'tokenizer')}"
)
_SMOLLM2 = os.environ.get("POSTTRAIN_GPU_SMOLLM2", "smollm2")
_REAL = f"--model {_SMOLLM2} --data {os.environ.get('POSTTRAIN_GPU_GSM8K', 'gsm8k')}"
_ROUNDS = f"scripts/bench_real_rollouts.py {_REAL} --rounds 7 --engine"
_PROMPTS = "scripts/bench_prompts.py --n 8 --prompt 512 --response 1024 --steps 3"
_TWO = "--sequence-parallel 2 --checkpointing selective"
GROUPS: dict[str, list[Job]] = {
    "kernels": [
        _test("kernels", "test_training_kernels", "test", limit_s=240),
        _test("lora", "test_lora_gpu", "test", limit_s=360),
        _test("hostmem", "test_hostmem_gpu", "test", limit_s=60),
    ],
    "sft": [_test("sft", "test_sft_gpu", "test", gpus=2)],
    "rl": [
        _test(f"rl-{select.lower()}", "test_rl_gpu", select, limit_s=240)
        for select in ("PPO", "reference", "offloaded", "GSPO", "LoRA")
    ],
    "training": [
        _bench("head", "scripts/bench_train.py head", limit_s=120),
        _bench("rows-7b", "scripts/bench_train.py rows --shape 7b"),
        _bench("rows-0.5b", "scripts/bench_train.py rows --tokens-per-microbatch 32768 --peer-rows 4"),
    ],
    "experts": [
        _bench("rows-7b-a1b", "scripts/bench_train.py rows --shape 7b-a1b --rows 8 --steps 5", limit_s=700),
        _bench("experts-7b-a1b", "scripts/bench_train.py experts --shape 7b-a1b", limit_s=200),
        _bench("rows-30b-a3b", f"{_ADAPTERS} --rows 4 --steps 3 --only ours", limit_s=400),
        *(_bench(f"replay-{engine}", f"{_REPLAY} {engine}", limit_s=500) for engine in ("sglang", "vllm")),
    ],
    "fp8": [
        _fp8("fp8-sglang", "sglang", "--options", _FEW_GRAPHS),
        _fp8("fp8-sglang-triton", "sglang", "--options", _FEW_GRAPHS, *_TRITON),
        _fp8("fp8-vllm", "vllm", "--options", _QUICK_START["vllm"]),
    ],
    "real": [
        _bench("start", f"scripts/bench_start.py {_REAL}", limit_s=600),
        _bench("real-sglang", f"{_ROUNDS} sglang", limit_s=400),
        _bench("real-vllm", f"{_ROUNDS} vllm", limit_s=400),
    ],
    "prompts": [
        _bench("prompts-0.5b", f"{_PROMPTS} --shape 0.5b --groups 128 --tokens-per-microbatch 65536"),
        _bench("prompts-3b", f"{_PROMPTS} --shape 3b --groups 16 --lora-rank 16"),
    ],
    "training-2": [
        _bench("shards-2", f"{_SHARDS} --gpus 2 --rows 8", gpus=2, limit_s=120),
        _bench("long-2", f"{_LONG} --gpus 2 --rows 2 {_TWO}", gpus=2, limit_s=120),
    ],
    "training-4": [
        _bench("shards-4", f"{_SHARDS} --gpus 4 --rows 16", gpus=4, limit_s=150),
        _bench("long-4-sp1", f"{_LONG} --gpus 4 --rows 4 --checkpointing full", gpus=4, limit_s=150),
        _bench("long-4-sp2", f"{_LONG} --gpus 4 --rows 4 {_TWO}", gpus=4, limit_s=150),
        _bench("long-4-sp4", f"{_LONG} --gpus 4 --rows 4 --sequence-parallel 4", gpus=4, limit_s=150),
    ],
    "check": [
        _bench("check-1", _CHECK, limit_s=360),
        _bench("check-2", f"{_CHECK} --workers 2", gpus=2, limit_s=360),
    ],
    "save": [_bench("save", "scripts/bench_save.py --shape 7b --gpus 2 --folder /tmp/save", gpus=2, limit_s=500)],
    "sglang": _engine("sglang"),
    "vllm": _engine("vllm"),
}  # fmt: skip


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    gpus: list[str]
    temporary: str
    began: float


def run(jobs: Sequence[Job], gpus: Sequence[str], out: Path, limit_s: float) -> dict[str, tuple[int | None, float]]:
    """Run all that fit into ``limit_s`` seconds.

    Returns:
        name of a job -> (exit status, None where it ran out of time; seconds), of those that were started.
    """
    out.mkdir(parents=True, exist_ok=True)
    waiting, running, free = list(jobs), [], list(gpus)
    done: dict[str, tuple[int | None, float]] = {}
    deadline = time.monotonic() + limit_s
    while (waiting and time.monotonic() < deadline) or running:
        now = time.monotonic()
        for one in list(running):
            late = now - one.began > one.job.limit_s or now > deadline
            if one.process.poll() is None and late:
                os.killpg(one.process.pid, signal.SIGKILL)
                one.process.wait()
            if one.process.poll() is not None:
                running.remove(one)
                if late or one.process.returncode:
                    _keep_worker_logs(Path(one.temporary), out / f"{one.job.name}.workers.log")
                shutil.rmtree(one.temporary, ignore_errors=True)
                free += one.gpus
                done[one.job.name] = (None if late else one.process.returncode, now - one.began)
        while waiting and waiting[0].gpus <= len(free) and now < deadline:
            job = waiting.pop(0)
            mine, free = free[: job.gpus], free[job.gpus :]
            # Temporary files in memory: writing checkpoints to a slow disk is not what is measured.
            temporary = tempfile.mkdtemp(prefix="job-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
            running.append(_Running(job, _start(job, mine, temporary, out), mine, temporary, now))
        time.sleep(0.1)
    return done


def _start(job: Job, gpus: list[str], temporary: str, out: Path) -> subprocess.Popen[bytes]:
    env = dict(os.environ) | {
        "CUDA_VISIBLE_DEVICES": ",".join(gpus), "TMPDIR": temporary,
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "PYTHONUNBUFFERED": "1", **job.env,
    }  # fmt: skip
    with (out / f"{job.name}.log").open("wb") as log:
        return subprocess.Popen(
            job.command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def _keep_worker_logs(temporary: Path, file: Path) -> None:
    """The ends of what Ray's workers wrote, before they are removed; the latest first."""
    logs = [log for kind in ("err", "out") for log in temporary.glob(f"ray/session_2*/logs/worker*.{kind}")]
    ends = []
    for log in sorted(logs, key=lambda log: log.stat().st_mtime, reverse=True):
        if text := log.read_text(errors="replace")[-6000:].strip():
            ends.append(f"## {log.name}\n{text}\n")
    file.write_text("\n".join(ends))


def report(job: str, found: tuple[int | None, float], out: Path, lines: int = 12) -> str:
    """What a job printed that matters."""
    text = (out / f"{job}.log").read_text(errors="replace").splitlines()
    text = [line[:600] for line in text if line.strip() and "logging.cc" not in line and "AbslFailure" not in line]
    rows = [line for line in text if line.startswith(("|", "{", "E  ", "│"))][-30:]
    ended = "out of time" if found[0] is None else f"exit status {found[0]}"
    return "\n".join([f"#### {job}: {ended}, {found[1]:.0f} s", *rows, "...", *text[-lines:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", help="jobs, or groups of them")
    parser.add_argument("--list", action="store_true", help="show them")
    parser.add_argument("--out", type=Path, default=Path("/tmp/posttrain-gpu"))
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for all")
    args = parser.parse_args()
    if args.list:
        for name, group in GROUPS.items():
            print(f"{name}: {', '.join(f'{job.name} ({job.gpus} GPU)' for job in group)}")
        return
    known = {job.name: [job] for group in GROUPS.values() for job in group} | GROUPS
    if unknown := [name for name in args.jobs if name not in known]:
        parser.error(f"no such job: {', '.join(unknown)}; --list shows them")
    jobs = [job for name in args.jobs for job in known[name]]
    import torch

    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    if too_large := [job.name for job in jobs if job.gpus > len(gpus)]:
        parser.error(f"more GPUs than the {len(gpus)} of this machine: {', '.join(too_large)}")
    done = run(jobs, gpus, args.out, args.limit)
    for job in jobs:
        print(report(job.name, done[job.name], args.out) if job.name in done else f"#### {job.name}: not started")


if __name__ == "__main__":
    main()
