"""Training with images beside TRL, against the plan, and from engine to trainer, on geometry3k's figures.

    python scripts/bench_vision.py data --source FOLDER --tokenizer FOLDER     writes --data, five megabytes
    python scripts/bench_vision.py sft                    SFT with the tower frozen and trained, beside the plan
    python scripts/bench_vision.py trl                    the same rows through TRL's SFTTrainer
    python scripts/bench_vision.py grpo --engine vllm     a step by phase, and the gap with images and without

`--source` has geometry3k's original folders of a problem, `--tokenizer` Qwen's vocab.json, merges.txt and templates;
`data` makes of both what the other commands need, so that it can be taken to a machine with a GPU. The model has the
shape of Qwen2.5-VL-3B and random weights, or with `--shape tiny` is small enough for a CPU. There are few figures,
which are repeated; what a figure takes of the GPU does not depend on that. Geometry3k has no worked solutions: answers
of `--answer` words stand in for them. Rates are of the median step after the first two. TRL runs in `--peer-python`,
which needs torchvision; on a GPU both sides compute in bfloat16 with weights of `--param-dtype`, on a CPU in float32.
A command that has not come to its end after `--limit` seconds is stopped, and what its steps measured until then is
reported; all that it says is in `--out`/NAME.log.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WARM_UP = 2
PASSED = ("shape", "out", "data", "rows", "steps", "peer_rows", "param_dtype")
"""Options that TRL's process gets too."""
LEARNING_RATE = 1e-6
IDS = {
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "image_token_id": 151655,
    "video_token_id": 151656,
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor", "min_pixels": 3136,
    "max_pixels": 12_845_056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip
"""As Qwen2.5-VL's releases have it."""
TINY = {
    "text_config": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "mrope_section": [4, 6, 6],
    },
    "vision_config": {
        "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 128,
        "fullatt_block_indexes": [1],
    },
}  # fmt: skip


# ---------------------------------------------------------------------- data and model


def write_data(args: argparse.Namespace) -> None:
    """Write rows of each problem once, the tokenizer, and how images are read."""
    from posttrain.data.parquet import write_rows
    from posttrain.prep.datasets.geometry3k import Geometry3k

    dataset = Geometry3k()
    raw = [row for split in dataset.splits for row in dataset.rows(split, str(args.source))]
    rows = [dataset.to_rlhf(row, i, "train") for i, row in enumerate(raw)]
    args.data.mkdir(parents=True, exist_ok=True)
    write_rows(args.data / "rl.parquet", rows)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(args.tokenizer / name, args.data / name)
    shutil.copy(args.tokenizer / "qwen3_tokenizer_config.json", args.data / "tokenizer_config.json")
    shutil.copy(args.tokenizer / "templates" / "qwen2_5_vl.jinja", args.data / "chat_template.jinja")
    (args.data / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    size = sum(file.stat().st_size for file in args.data.iterdir())
    print(f"{len(rows)} problems, {size:,} bytes in {args.data}")


def repeated(args: argparse.Namespace, count: int, kind: str) -> Path:
    """Write ``count`` rows of a kind: "sft", "rl", or "text", which is rl without the figures."""
    import pyarrow.parquet as pq

    from posttrain.core.types import Message
    from posttrain.data.parquet import sft_row, write_rows
    from posttrain.data.schema import Conversation

    found = pq.read_table(args.data / "rl.parquet").to_pylist()
    rows: list[dict[str, Any]] = []
    for row in (found[i % len(found)] for i in range(count)):
        if kind == "sft":
            asked = [Message(role=m["role"], content=m["content"]) for m in row["prompt"]]
            words = [f"step {i}: the angle is {i * 7 % 180}" for i in range(args.answer // 5)]
            answer = Message(role="assistant", content="; ".join(words) + "\\boxed{7}")
            images = [{"bytes": image["bytes"]} for image in row["images"]]
            rows.append(sft_row(Conversation([*asked, answer], images=images)))
        elif kind == "text":
            prompt = [{**m, "content": m["content"].replace("<image>", "")} for m in row["prompt"]]
            rows.append({**row, "prompt": prompt, "images": None})
        else:
            rows.append(row)
    file = args.out / f"{kind}-{count}.parquet"
    write_rows(file, rows)
    return file


def make_model(args: argparse.Namespace) -> Path:
    """A model with random weights, written once."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    from posttrain.plan.known import known_models

    folder: Path = args.out / f"model-{args.shape}"
    if (folder / "config.json").is_file():
        return folder
    sizes: dict[str, Any] = json.loads(json.dumps(known_models()["Qwen/Qwen2.5-VL-3B-Instruct"]))
    section = [16, 24, 24]
    if args.shape == "tiny":
        for part, values in TINY.items():
            sizes[part] |= values
        section = sizes["text_config"].pop("mrope_section")
    rotary = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": section}
    sizes["text_config"] |= {"rope_parameters": rotary, "eos_token_id": 151645, "bos_token_id": 151643}
    torch.manual_seed(0)
    config = AutoConfig.for_model(**sizes, **IDS, architectures=["Qwen2_5_VLForConditionalGeneration"])
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()  # what is measured may need the room
    for file in args.data.iterdir():
        if file.suffix in (".json", ".txt", ".jinja") and file.name != "config.json":
            shutil.copy(file, folder / file.name)
    return folder


# ---------------------------------------------------------------------- our side


def posttrain(args: argparse.Namespace, command: str, name: str, **values: Any) -> tuple[list[dict[str, Any]], str]:
    """Run a command. Returns the metrics of the steps that it made, and what it said where it failed."""
    from posttrain.config.keys import flatten_tree

    shutil.rmtree(args.out / "runs" / name, ignore_errors=True)
    values = {
        "run.name": name, "run.logger": ["jsonl"], "model.path": str(args.model), "train.optim.lr": LEARNING_RATE,
        "train.tokens_per_microbatch": args.tokens, "train.activation_checkpointing": args.checkpointing,
        "train.param_dtype": args.param_dtype, "train.steps": args.steps + WARM_UP, "cluster.workers": args.workers,
        "cluster.start_deadline_s": 400.0, "run.profile": args.profile, **values,
    }  # fmt: skip
    preset = args.out / f"{command}.toml"  # of defaults alone
    preset.write_text(f'command = "{command}"\n')
    words = [word for key, value in flatten_tree(values).items() for word in ("--set", f"{key}={json.dumps(value)}")]
    said = run_limited(
        [sys.executable, "-m", "posttrain", command, "--preset", str(preset), *words],
        args.out, args.out / f"{name}.log", args.limit,
    )  # fmt: skip
    shutil.rmtree(args.out / "runs" / name / "checkpoints", ignore_errors=True)  # tens of gigabytes each
    file = args.out / "runs" / name / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else [], said


def run_limited(command: Sequence[str], cwd: Path, log: Path, limit_s: float) -> str:
    """Run a command with its output in ``log``, and end it after ``limit_s`` seconds. Returns the end of what it
    said where it failed or was stopped."""
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=cwd, stdout=out, stderr=subprocess.STDOUT)
        why = ""
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            why = f"stopped after {limit_s:.0f} s: "
            process.terminate()  # and no SIGINT, which a shell's background jobs ignore
            try:
                process.wait(60.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return why + log.read_text()[-3000:] if why or process.returncode else ""


def median(rows: list[dict[str, Any]], key: str) -> float | None:
    found = [float(row[key]) for row in rows[WARM_UP:] if key in row]
    return statistics.median(found) if found else None


def compared(args: argparse.Namespace, name: str) -> Any:
    """Return what was predicted of a run beside what it has measured, or why that is not known."""
    command = [sys.executable, "-m", "posttrain", "plan", "--run", name, "--json"]
    plan = subprocess.run(command, cwd=args.out, capture_output=True, text=True)
    return json.loads(plan.stdout)["compared"] if plan.returncode == 0 else plan.stderr[-500:]


def sft(args: argparse.Namespace) -> None:
    """Tokens a second, MFU with the tower counted, and memory against the plan; the tower frozen and trained."""
    data = repeated(args, args.rows * (args.steps + WARM_UP), "sft")
    for tower in args.towers:
        name = f"vision-sft-{tower}"
        rows, said = posttrain(
            args, "sft", name, **{
                "data.train": str(data), "data.batch_size": args.rows, "data.max_length": 8192,
                "train.vision_tower": tower, "train.patches_per_microbatch": args.patches,
            },
        )  # fmt: skip
        found: dict[str, Any] = {"what": f"posttrain sft, tower {tower}", "said": said}
        keys = {
            "tokens_per_s_gpu": "perf/tokens_per_second_per_gpu", "mfu": "perf/mfu", "memory_gib": "perf/memory_gib",
            "step_s": "timing_s/update", "data_wait": "perf/data_wait", "tokens": "train/tokens",
        }  # fmt: skip
        found |= {short: median(rows, key) for short, key in keys.items()}
        found["losses"] = [row["train/loss"] for row in rows]
        found["plan"] = compared(args, name) if rows else None
        report(found)


def grpo(args: argparse.Namespace) -> None:
    """Seconds of each phase, and the gap; then the same on the problems' texts alone, for the gap."""
    for kind in args.kinds:
        data = repeated(args, args.prompts * (args.steps + WARM_UP), kind)
        name = f"vision-grpo-{kind}"
        rows, said = posttrain(
            args, "rl", name, **{
                "data.train": str(data), "data.batch_size": args.prompts, "algo.name": "grpo", "rollout.n": args.n,
                "rollout.engine": args.engine, "rollout.engine_options": args.options,
                "rollout.max_prompt_tokens": 2048, "rollout.max_response_tokens": args.response,
                "rollout.memory_fraction": args.memory_fraction,
                "train.patches_per_microbatch": args.patches, "train.offload": args.offload,
            },
        )  # fmt: skip
        phases = sorted({key for row in rows for key in row if key.startswith("timing_s/")})
        names = [*phases, "perf/memory_gib", "perf/mfu", "perf/total_num_tokens", "sync/check_gap"]
        names += ["rollout_gap/mean_abs", "rollout_gap/k3", "rollout_gap/outside"]
        found = {key: value for key in names if (value := median(rows, key)) is not None}
        found["plan"] = compared(args, name) if rows else None
        report({"what": f"posttrain rl, {args.engine}, {'images' if kind == 'rl' else 'text'}", "said": said} | found)


# ---------------------------------------------------------------------- TRL


def trl(args: argparse.Namespace) -> None:
    """TRL's side, in an interpreter of its own."""
    data = repeated(args, args.rows * (args.steps + WARM_UP), "sft")
    values = {k: str(v) for k, v in vars(args).items() if k in PASSED}
    for tower in args.towers:
        options = [word for key, value in values.items() for word in (f"--{key.replace('_', '-')}", value)]
        command = [args.peer_python, __file__, "_trl", *options, "--towers", tower, "--file", str(data)]
        log = args.out / f"trl-{tower}.log"
        said = run_limited(command, args.out, log, args.limit)
        report({"what": f"TRL, tower {tower}", "said": said} if said else json.loads(log.read_text().splitlines()[-1]))


def train_trl(args: argparse.Namespace) -> dict[str, Any]:
    """The same rows through SFTTrainer: images are read by transformers' own processor, rows are padded."""
    import pyarrow.parquet as pq
    import torch
    from datasets import Dataset
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    gpu, tower = torch.cuda.is_available(), args.towers[0]
    rows = pq.read_table(args.file).to_pylist()
    examples = []
    for row in rows:
        asked, answer = row["messages"]
        figures = [Image.open(io.BytesIO(image["bytes"])).convert("RGB") for image in row["images"]]
        text = asked["content"].replace("<image>", "")
        examples.append({
            "images": figures, "prompt": [{"role": "user", "content": text}],
            "completion": [{"role": "assistant", "content": answer["content"]}],
        })  # fmt: skip
    folder = args.out / f"model-{args.shape}"
    model: Any = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=getattr(torch, args.param_dtype), attn_implementation="sdpa", device_map="cuda" if gpu else "cpu"
    )
    for parameter in model.model.visual.parameters():
        parameter.requires_grad_(tower == "trained")
    times: list[float] = []
    tokens: list[int] = []

    def now() -> float:
        if gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = now()
            tokens.append(0)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(now() - self.start)

    class Counting(SFTTrainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            tokens[-1] += int(inputs["attention_mask"].sum())
            return super().training_step(model, inputs, *rest, **named)

    trainer = Counting(
        model=model,
        args=SFTConfig(
            output_dir=str(args.out / "trl"), max_steps=args.steps + WARM_UP, logging_steps=1, save_strategy="no",
            report_to="none", per_device_train_batch_size=args.peer_rows,
            gradient_accumulation_steps=args.rows // args.peer_rows, learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant", bf16=gpu, use_cpu=not gpu, gradient_checkpointing=False, max_length=None,
            max_grad_norm=1.0, weight_decay=0.0, shuffle_dataset=False, train_sampling_strategy="sequential",
            dataloader_num_workers=2 if gpu else 0, use_liger_kernel=gpu,
        ),
        train_dataset=Dataset.from_list(examples),
        processing_class=AutoProcessor.from_pretrained(folder),
        callbacks=[Clock()],
    )  # fmt: skip
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    rates = [n / s for n, s in zip(tokens, times, strict=True)][WARM_UP:]
    return {
        "what": f"TRL, tower {tower}, {args.peer_rows} rows at once",
        "tokens_per_s_gpu": statistics.median(rates),
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if gpu else None,
        "step_s": statistics.median(times[WARM_UP:]),
        "tokens": statistics.median(tokens[WARM_UP:]),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


# ---------------------------------------------------------------------- the driver


def report(found: dict[str, Any]) -> None:
    shown = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in found.items() if v not in ("", None)}
    print(json.dumps(shown), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["data", "sft", "trl", "grpo", "_trl"])
    parser.add_argument("--source", type=Path, help="data: geometry3k's folders")
    parser.add_argument("--tokenizer", type=Path, help="data: Qwen's vocabulary and templates")
    parser.add_argument("--data", type=Path, default=Path("bench-vision-data"), help="what `data` wrote")
    parser.add_argument("--out", type=Path, default=Path("/tmp/posttrain-bench-vision"))
    parser.add_argument("--shape", choices=["3b", "tiny"], default="3b")
    parser.add_argument("--rows", type=int, default=64, help="of a step of SFT")
    parser.add_argument("--steps", type=int, default=6, help="that count, after two")
    parser.add_argument("--answer", type=int, default=256, help="words of an answer of SFT")
    parser.add_argument("--tokens", type=int, default=16_384, help="train.tokens_per_microbatch")
    parser.add_argument("--patches", type=int, default=32_768, help="train.patches_per_microbatch")
    parser.add_argument("--checkpointing", default="none")
    parser.add_argument("--workers", type=int, default=1, help="of SFT and GRPO, each with a GPU")
    parser.add_argument("--towers", nargs="+", choices=["frozen", "trained"], default=["frozen", "trained"])
    parser.add_argument("--engine", default="hf")
    parser.add_argument("--prompts", type=int, default=32, help="of a step of GRPO")
    parser.add_argument("--n", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--response", type=int, default=512, help="most tokens of a response")
    parser.add_argument("--memory-fraction", type=float, default=0.4)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--options", type=json.loads, default={}, help="of GRPO, JSON: rollout.engine_options")
    parser.add_argument("--kinds", nargs="+", choices=["rl", "text"], default=["rl", "text"], help="of GRPO")
    parser.add_argument("--param-dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--profile", default="", help="steps to profile: run.profile")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of each run")
    parser.add_argument("--peer-rows", type=int, default=8, help="rows that TRL runs at once")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out, args.data = args.out.resolve(), args.data.resolve()
    if args.command == "_trl":
        print(json.dumps(train_trl(args)))
        return
    if args.command == "data":
        write_data(args)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    args.model = make_model(args)
    {"sft": sft, "trl": trl, "grpo": grpo}[args.command](args)


if __name__ == "__main__":
    main()
