"""GRPO with posttrain, TRL and verl: the same model, prompts, template, group size, lengths, learning rate, batch,
engine and precision, one after the other, each in processes of its own.

    python scripts/bench_peers.py posttrain trl --work cpu --python-trl DIR/bin/python
    python scripts/bench_peers.py posttrain trl verl --work a --model DIR --gsm8k DIR --seeds 0 1 2 \\
        --python-trl PYTHON --python-verl PYTHON

    cpu      random weights of builtin:tiny, 8 prompts x 4, up to 48 tokens, embedded engines: no GPU
    a        SmolLM2-135M (`--model`), GSM8K, 64 prompts x 16, up to 400 tokens
    b        Qwen2.5-0.5B's shape, random, 128 x 8, 512 + 1,024 tokens
    c-full   Qwen2.5-3B's shape, random, 64 x 8, 512 + 1,024 tokens
    c-lora   the same, LoRA of rank 16
    d        SmolLM2-135M after SFT with the calculator (`--model`), GSM8K with it, up to three turns, 64 x 16, up to
             768 tokens; a run that never calls it has failed

On a GPU all of them sample with vLLM; `--tokenizer` is the one of random models. Every command is printed, and kept
with the output in `--out`. Seconds of a phase are medians over the steps after the first; `tokens/s` is all tokens of a
step over its seconds. Rest is what no phase has: rewards, advantages, and the system's own work. Memory is the most
that the GPU had in use, or without one the processes' own share (PSS). Another system's time to its first step counts
from its command. Rewards, lengths and tool calls of an episode are those of each step.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
TASK = HERE / "bench_peers_task.py"
PHASES = ("rollout", "logprobs", "update", "weights")
GSM8K: dict[str, Any] = {"source": "gsm8k", "prompt": 512, "prompts": 64, "n": 16, "lr": 1e-5, "shape": None}
RANDOM: dict[str, Any] = {"source": "letters", "prompt": 512, "response": 1024, "lr": 1e-6, "n": 8, "tokens": 16_384}
LARGE: dict[str, Any] = {"prompts": 64, "shape": "3b", "trl_rows": 8, "checkpointing": True, "sleep": True,
                         "memory_fraction": 0.35}  # fmt: skip
WORKS: dict[str, dict[str, Any]] = {
    "cpu": {"source": "letters", "prompt": 128, "response": 48, "prompts": 8, "n": 4, "lr": 1e-3, "shape": "tiny",
            "trl_rows": 32},
    "a": GSM8K | {"response": 400, "trl_rows": 32},
    "b": RANDOM | {"prompts": 128, "shape": "0.5b", "trl_rows": 8},
    "c-full": RANDOM | LARGE,
    "c-lora": RANDOM | LARGE | {"lora_rank": 16},
    "d": GSM8K | {"response": 768, "turns": 3, "trl_rows": 16},
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "turns": 1, "lora_rank": None, "checkpointing": False, "memory_fraction": 0.4, "sleep": False, "tokens": 32_768,
}  # fmt: skip
"""`tokens` of a micro-batch (posttrain, verl), `trl_rows` the rows of TRL's: as many as fit beside the engine. `sleep`:
the engine leaves the GPU during updates; verl's always does."""


# ---------------------------------------------------------------------- what all of them get


def make_job(args: argparse.Namespace, gpu: bool) -> dict[str, Any]:
    """The work with its model and prompts, written into `--out`."""
    from posttrain.data.parquet import write_rows

    work = WORKS[args.work]
    job = DEFAULTS | work | {"steps": args.steps, "gpu": gpu, "trl_continuous": args.trl_continuous}
    job |= json.loads(args.change) | {"trl_options": json.loads(args.trl_options)}
    job["model"] = str(args.model or make_model(args, job["shape"]))
    rows = []
    for index, (question, answer) in enumerate(questions(args, job["source"])):
        message = {"role": "user", "content": question}
        rows.append({
            "data_source": job["source"], "prompt": [message], "ground_truth": answer,
            "reward_model": {"style": "rule", "ground_truth": answer}, "extra_info": {"index": index},
        })  # fmt: skip
        if len(rows) == job["prompts"] * args.steps:
            break
    job |= {"parquet": str(args.out / "prompts.parquet"), "rows": str(args.out / "prompts.jsonl")}
    write_rows(job["parquet"], rows)
    Path(job["rows"]).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return job


def questions(args: argparse.Namespace, source: str) -> Iterator[tuple[str, str]]:
    """Pairs of question and answer: GSM8K's, or sums."""
    if source == "letters":
        for number in range(1_000_000):
            a, b = number * 7919 % 997, number * 104_729 % 991
            yield f"What is {a} + {b}?", str(a + b)
    for line in (args.gsm8k / "train.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield row["question"], row["answer"].rsplit("####", 1)[1].strip().replace(",", "")


def make_model(args: argparse.Namespace, shape: str | None) -> Path:
    """A random model of the shape with a tokenizer, in a folder that every system can read."""
    if shape is None:
        sys.exit(f"--work {args.work} needs --model")
    folder: Path = args.out / "model" / shape
    if shape == "tiny":
        from posttrain.models.builtin import builtin_tokenizer, create_builtin

        create_builtin("tiny", 0).save_pretrained(folder)
        builtin_tokenizer("tiny").save_pretrained(folder)
        return folder
    if args.tokenizer is None:
        sys.exit(f"--work {args.work} needs --tokenizer")
    from bench_train import model_folder
    from transformers import AutoTokenizer

    model_folder(folder.parent, shape)
    AutoTokenizer.from_pretrained(args.tokenizer).save_pretrained(folder)
    return folder


# ---------------------------------------------------------------------- the commands


def posttrain_command(job: dict[str, Any], args: argparse.Namespace) -> list[str]:
    # Without a preset the command would take its default one, with a tool and a schedule.
    preset = Path(job["out"]) / "preset.toml"
    preset.write_text('command = "rl"\n', encoding="utf-8")
    settings = {
        "run.dir": job["out"], "run.name": "run", "run.seed": job["seed"], "run.report": "false",
        "data.train": job["parquet"], "data.shuffle": "false", "data.batch_size": job["prompts"],
        "train.steps": job["steps"], "train.optim.lr": job["lr"], "train.optim.betas": "[0.9, 0.999]",
        "train.optim.weight_decay": 0.0, "train.tokens_per_microbatch": job["tokens"],
        "rollout.engine": "vllm" if job["gpu"] else "hf", "rollout.n": job["n"],
        "rollout.max_prompt_tokens": job["prompt"], "rollout.max_response_tokens": job["response"],
        "rollout.memory_fraction": job["memory_fraction"], "reward.function": f"{TASK}:compute_score",
        "train.activation_checkpointing": "full" if job["checkpointing"] else "none",
        "rollout.sleep": json.dumps(job["sleep"]),
    }  # fmt: skip
    if job["lora_rank"]:
        settings |= {"train.lora.rank": job["lora_rank"], "train.lora.alpha": 32}
    if job["turns"] > 1:
        settings |= {"rollout.max_turns": job["turns"], "rollout.tools": json.dumps([f"{TASK}:calculator"])}
    sets = [f"--set={key}={value}" for key, value in settings.items()] + [f"--set={s}" for s in args.posttrain_set]
    start = [args.python_posttrain, "-m", "posttrain", "rl", "--preset", str(preset), "--algo", "grpo"]
    return [*start, "--model", job["model"], *sets]


def trl_command(job: dict[str, Any], args: argparse.Namespace) -> list[str]:
    file = Path(job["out"]) / "job.json"
    file.write_text(json.dumps(job), encoding="utf-8")
    return [args.python_trl, str(HERE / "bench_peers_trl.py"), str(file)]


def verl_command(job: dict[str, Any], args: argparse.Namespace) -> list[str]:
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    settings = {
        "algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": False,
        "data.train_files": job["parquet"], "data.val_files": job["parquet"], "data.shuffle": False,
        "data.train_batch_size": job["prompts"], "data.max_prompt_length": job["prompt"],
        "data.max_response_length": job["response"], "actor_rollout_ref.model.path": job["model"],
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": job["checkpointing"],
        "actor_rollout_ref.model.use_fused_kernels": True,
        f"{actor}.ppo_mini_batch_size": job["prompts"], f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": job["tokens"], f"{actor}.use_kl_loss": False,
        f"{actor}.loss_agg_mode": "token-mean", f"{actor}.optim.lr": job["lr"], f"{actor}.optim.weight_decay": 0.0,
        f"{actor}.grad_clip": 1.0, f"{rollout}.name": "vllm", f"{rollout}.n": job["n"],
        f"{rollout}.gpu_memory_utilization": job["memory_fraction"], f"{rollout}.log_prob_use_dynamic_bsz": True,
        f"{rollout}.tensor_model_parallel_size": 1,  # two by default
        f"{rollout}.max_num_seqs": job["prompts"] * job["n"],
        f"{rollout}.max_model_len": job["prompt"] + job["response"],
        f"{rollout}.log_prob_max_token_len_per_gpu": job["tokens"],
        "reward.custom_reward_function.path": str(TASK), "reward.custom_reward_function.name": "compute_score",
        "trainer.logger": '["console"]', "trainer.n_gpus_per_node": 1, "trainer.nnodes": 1, "trainer.save_freq": -1,
        "trainer.test_freq": -1, "trainer.val_before_train": False, "trainer.total_training_steps": job["steps"],
        "trainer.default_local_dir": job["out"], "data.seed": job["seed"],
    }  # fmt: skip
    if job["lora_rank"]:
        settings |= {
            "actor_rollout_ref.model.lora_rank": job["lora_rank"], "actor_rollout_ref.model.lora_alpha": 32,
            "actor_rollout_ref.model.target_modules": "all-linear", f"{rollout}.load_format": "safetensors",
            f"{actor}.strategy": "fsdp2",  # by its default, FSDP1, vLLM gets an adapter without weights on one GPU
        }  # fmt: skip
    if job["turns"] > 1:
        settings |= {
            f"{rollout}.multi_turn.enable": True, f"{rollout}.multi_turn.max_assistant_turns": job["turns"],
            f"{rollout}.multi_turn.function_tool_path": str(TASK), f"{rollout}.agent.default_agent_loop": "tool_agent",
            "data.return_raw_chat": True,
        }  # fmt: skip
    sets = [f"{key}={value}" for key, value in settings.items()]
    return [args.python_verl, "-m", "verl.trainer.main_ppo", *sets, *args.verl_set]


COMMANDS = {"posttrain": posttrain_command, "trl": trl_command, "verl": verl_command}


# ---------------------------------------------------------------------- a run


def run(system: str, job: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Run a system; its steps, its memory and its command."""
    Path(job["out"]).mkdir(parents=True)
    command = COMMANDS[system](job, args)
    print(f"\n{system}: {shlex.join(command)}", file=sys.stderr, flush=True)
    log, started = Path(job["out"]) / "log.txt", time.time()
    env = os.environ | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    env |= dict(pair.split("=", 1) for pair in getattr(args, f"{system}_env"))
    if system == "verl":
        env["VERL_USE_EXTERNAL_MODULES"] = "bench_peers_verl"
        env["PYTHONPATH"] = os.pathsep.join([*filter(None, [env.get("PYTHONPATH")]), str(HERE)])
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    memory = Memory(process.pid, job["gpu"])
    lines: list[tuple[float, str]] = []
    reader = threading.Thread(target=keep_lines, args=(process.stdout, log, lines))
    reader.start()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(args.limit)  # one that takes so long is taken to hang
    peak = memory.stop()
    end_descendants()  # Ray's processes and engines may outlive the command, and hold the pipe
    code = process.wait()
    reader.join()
    result = {"system": system, "seed": job["seed"], "command": command}
    steps = READERS[system](job, lines)
    if code or not steps:
        print("".join(line for _, line in lines[-30:]), file=sys.stderr)
        result |= {"failed": f"exit code {code} after {len(steps)} steps, see {log}"}
    if steps and job["turns"] > 1 and not any(step["calls"] for step in steps):
        result |= {"failed": f"no tool call in {len(steps)} steps: --model is none that calls tools"}
    for step in steps:
        step["first_s"] = step.pop("at") - started
    if steps:
        result |= {"steps": steps, "memory_gib": peak, "versions": versions(command[0], env)}
    return result


def keep_lines(source: IO[str], log: Path, lines: list[tuple[float, str]]) -> None:
    """Write the lines of a process into its log as they come, and append them to ``lines`` with their times."""
    with log.open("w", encoding="utf-8") as file:
        for line in source:
            lines.append((time.time(), line))
            file.write(line)
            file.flush()


def read_posttrain(job: dict[str, Any], _: list[tuple[float, str]]) -> list[dict[str, float]]:
    file = Path(job["out"]) / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    sampled = [row for row in rows if "timing_s/gen" in row]
    return [_named(row | {"at": row["time"]}, "sync", row["tools/calls_per_episode"]) for row in sampled]


def read_verl(job: dict[str, Any], lines: list[tuple[float, str]]) -> list[dict[str, float]]:
    found = []
    for at, line in lines:
        if match := re.search(r"\bstep:(\d+) - (.*)", line):
            pairs = re.findall(r"([\w/@.-]+):(?:np\.\w+\()?(-?[\d.]+(?:e[+-]?\d+)?)\)?", match[2])
            row: dict[str, float] = {"step": int(match[1]), "at": at} | {name: float(value) for name, value in pairs}
            if "timing_s/gen" in row:
                rounds = (row.get("num_turns/mean", 2.0) - 2) / 2  # it counts messages: a call adds two to two
                found.append(_named(row, "update_weights", rounds))
    return found


def _named(row: dict[str, float], weights: str, calls: float) -> dict[str, float]:
    """The metrics of posttrain and verl, which have the same names but two, as a step of the table."""
    return {
        "step": row["step"], "at": row["at"], "seconds": row["timing_s/step"], "rollout": row["timing_s/gen"],
        "logprobs": row.get("timing_s/old_log_prob", 0.0), "update": row["timing_s/update_actor"],
        "weights": row.get(f"timing_s/{weights}", 0.0), "reward": row["critic/score/mean"],
        "length": row["response_length/mean"], "tokens": row["perf/total_num_tokens"], "calls": calls,
    }  # fmt: skip


def read_trl(job: dict[str, Any], lines: list[tuple[float, str]]) -> list[dict[str, float]]:
    return [json.loads(line) for _, line in lines if line.startswith('{"step":')]


READERS = {"posttrain": read_posttrain, "trl": read_trl, "verl": read_verl}


def versions(python: str, env: dict[str, str]) -> str:
    """Versions of what matters in an interpreter, and under its environment."""
    code = (
        "from importlib.metadata import version, PackageNotFoundError\n"
        "for name in ('posttrain', 'trl', 'verl', 'torch', 'transformers', 'vllm', 'flash-attn-4', 'liger-kernel'):\n"
        "    try: print(name, version(name), end='; ')\n"
        "    except PackageNotFoundError: pass\n"
    )
    return subprocess.run([python, "-c", code], env=env, capture_output=True, text=True, check=True).stdout.strip("; ")


def descendants(root: int) -> list[int]:
    """All processes that a process has started and that run, with those that these have started."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:  # it has ended
            continue
        if state != "Z":
            parents.setdefault(int(parent), []).append(int(stat.parent.name))
    found, todo = [], [root]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def adopt_orphans() -> None:
    """Have processes whose parent ends become children of this one, so that ``end_descendants`` finds them."""
    set_child_subreaper = 36  # of Linux's prctl.h
    ctypes.CDLL(None, use_errno=True).prctl(set_child_subreaper, 1, 0, 0, 0)


def end_descendants(wait: float = 30.0) -> None:
    """Kill all that this process has started, however deep. (`ray stop` would end other runs as well.)"""
    deadline = time.monotonic() + wait
    while (found := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


class Memory(threading.Thread):
    """Watches the most memory in use, GiB: of the GPU, or of a process with all that it started."""

    def __init__(self, pid: int, gpu: bool) -> None:
        super().__init__(daemon=True)
        self.pid, self.gpu, self.peak, self.done = pid, gpu, 0.0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self.done.wait(0.5):
            self.peak = max(self.peak, self._gpu() if self.gpu else self._host())

    def stop(self) -> float:
        self.done.set()
        self.join()
        return self.peak

    @staticmethod
    def _gpu() -> float:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        if gpus := os.environ.get("CUDA_VISIBLE_DEVICES"):
            query.append(f"--id={gpus}")
        return max(map(float, subprocess.run(query, capture_output=True, text=True, check=True).stdout.split())) / 1024

    def _host(self) -> float:
        total = 0
        for pid in [self.pid, *descendants(self.pid)]:
            try:
                found = re.search(r"^Pss: +(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
            except OSError:  # it has ended
                continue
            total += int(found[1]) if found else 0
        return total / 2**20


# ---------------------------------------------------------------------- the table


def summary(result: dict[str, Any]) -> dict[str, float]:
    """Medians over the steps after the first."""
    later = result["steps"][1:] or result["steps"]
    names = ("seconds", *PHASES)
    found = {name: statistics.median(step[name] for step in later) for name in names}
    found["rest"] = statistics.median(s["seconds"] - sum(s[phase] for phase in PHASES) for s in later)
    found["tokens_per_s"] = statistics.median(step["tokens"] / step["seconds"] for step in later)
    return found | {"memory_gib": result["memory_gib"], "first_s": result["steps"][0]["first_s"]}


def table(results: list[dict[str, Any]]) -> str:
    """A Markdown table of all runs, and one of rewards and lengths by step."""
    names = ("seconds", *PHASES, "rest", "tokens_per_s", "memory_gib", "first_s")
    heads = ("step, s", *PHASES, "rest", "tokens/s", "memory, GiB", "first step after, s")
    lines = ["| system | seed | " + " | ".join(heads) + " |", "| --- " * (len(heads) + 2) + "|"]
    for result in results:
        if "failed" in result:
            lines.append(f"| {result['system']} | {result['seed']} | {result['failed']} |")
        if "steps" not in result:
            continue
        found = summary(result)
        values = (f"{found[n]:,.0f}" if n == "tokens_per_s" else f"{found[n]:.3g}" for n in names)
        lines.append(f"| {result['system']} | {result['seed']} | " + " | ".join(values) + " |")
    lines.append("")
    for result in results:
        for name in ("reward", "length", "calls"):
            values = " ".join(f"{step[name]:.3g}" for step in result.get("steps", []))
            lines.append(f"{result['system']}, seed {result['seed']}, {name}: {values}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="+", choices=list(COMMANDS))
    parser.add_argument("--work", choices=list(WORKS), default="cpu")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="of a random model")
    parser.add_argument("--gsm8k", type=Path, help="folder with train.jsonl")
    parser.add_argument("--out", type=Path, help="by default a new temporary folder")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds that a system may take")
    parser.add_argument("--change", default="{}", help='JSON: other values of the work, as {"response": 200}')
    parser.add_argument("--trl-options", default="{}", help="JSON: more fields of GRPOConfig")
    parser.add_argument("--trl-continuous", action="store_true", help="TRL's continuous batching, without a GPU")
    parser.add_argument("--posttrain-set", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--verl-set", nargs="+", default=[], metavar="KEY=VALUE")
    for system in COMMANDS:
        parser.add_argument(f"--python-{system}", default=sys.executable, help="its interpreter")
        parser.add_argument(f"--{system}-env", nargs="+", default=[], metavar="NAME=VALUE", help="such as PYTHONPATH")
    args = parser.parse_args()
    import torch

    gpu = torch.cuda.is_available()
    if not gpu and (args.work != "cpu" or "verl" in args.systems):
        sys.exit("without a GPU there is --work cpu, with posttrain and trl")
    args.out = (args.out or Path(tempfile.mkdtemp(prefix="bench_peers_"))).resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    job = make_job(args, gpu)
    adopt_orphans()
    results = []
    for seed in args.seeds:
        for system in args.systems:
            of_run = job | {"seed": seed, "out": str(args.out / f"{system}-{seed}")}
            results.append(run(system, of_run, args) | {"load": os.getloadavg()[0]})
            (args.out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    for result in results:
        print(f"{result['system']}: {result.get('versions')}; load {result['load']:.1f}")
    print(table(results))
    if any("failed" in result for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
