"""A model of Qwen2.5-0.5B's shape that has learned GSM8K conversations for a minute: small, made on the spot, and as
sure of its tokens as a real one, which random weights are not.

    python scripts/gpu_model.py --tokenizer FOLDER --data FOLDER --out /tmp/posttrain-bench/0.5b-trained
    python scripts/gpu_model.py --tokenizer FOLDER --answer 250 --out /tmp/posttrain-bench/0.5b-uneven

`--data` is what `posttrain prep gsm8k` wrote. Nothing happens where such a model is there already; of several processes
that want it at the same time one trains it. `--answer TOKENS` trains nothing, and writes anew: of the random model's
vocabulary, one token in TOKENS ends an answer (by its generation config), so that the lengths are close to geometric.
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def trained_model(out: Path, tokenizer: Path, data: Path, steps: int = 240) -> Path:
    """The model's folder, ``out``."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (out / "config.json").is_file():
            return out
        with tempfile.TemporaryDirectory() as folder:
            begun = time.perf_counter()
            untrained = _untrained(Path(folder) / "untrained", tokenizer)
            settings = {
                "run.dir": folder, "run.name": "sft", "model.path": untrained, "data.train": data / "sft_train.parquet",
                "data.batch_size": 64, "data.max_length": 1024, "train.steps": steps, "train.optim.lr": 6e-4,
                "train.tokens_per_microbatch": 32768,
            }  # fmt: skip
            _posttrain("sft", "--preset", "qwen2.5-0.5b-gsm8k-sft", *_sets(settings))
            _posttrain("merge-ckpt", str(Path(folder) / "sft"), "--out", str(out), "--dtype", "bfloat16")
            print(f"trained {out} in {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    return out


def uneven_model(out: Path, tokenizer: Path, answer: int) -> Path:
    """The folder, ``out``, of a random model that ends its answers after about ``answer`` tokens in the mean."""
    from qwen_shape import qwen_half_b
    from transformers import GenerationConfig

    _untrained(out, tokenizer)
    GenerationConfig(eos_token_id=list(range(0, qwen_half_b().vocab_size, answer))).save_pretrained(out)
    return out


def _untrained(folder: Path, tokenizer: Path) -> Path:
    import torch
    from qwen_shape import qwen_half_b
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(qwen_half_b()).to(torch.bfloat16).save_pretrained(folder)
    for file in tokenizer.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    return folder


def _sets(settings: dict[str, object]) -> list[str]:
    return [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]


def _posttrain(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "posttrain", *arguments], capture_output=True, text=True, check=False, timeout=400
    )
    if done.returncode:
        raise RuntimeError(f"posttrain {arguments[0]} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "step" in line]
    print("\n".join(lines[-2:]), file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--data", type=Path, help="of GSM8K, to train on")
    how.add_argument("--answer", type=int, metavar="TOKENS", help="random weights, answers of about this mean length")
    parser.add_argument("--out", type=Path, default=Path("/tmp/posttrain-bench/0.5b-trained"))
    args = parser.parse_args()
    if args.data is not None:
        print(trained_model(args.out, args.tokenizer, args.data))
    else:
        print(uneven_model(args.out, args.tokenizer, args.answer))


if __name__ == "__main__":
    main()
