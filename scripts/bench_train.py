"""How close training is to the limit of the GPU, beside TRL with Liger in the same run.

    python scripts/bench_train.py head                         loss of 32k tokens x 152k vocabulary, beside Liger's
    python scripts/bench_train.py rows --shape 7b --rows 8     rows of 8,192 tokens on one GPU, beside TRL
    python scripts/bench_train.py chats --shape 0.5b --data FILE --tokenizer DIR
                                                               real conversations, packed, beside padding-free TRL
    python scripts/bench_train.py rows --shape 7b-a1b --rows 8 a mixture of experts, beside TRL
    python scripts/bench_train.py experts --shape 7b-a1b       the experts of one layer, beside those of transformers
    python scripts/bench_train.py rows --shape 30b-a3b --weights random --lora-rank 32 --checkpointing full --only ours
                                                               adapters of a mixture whose files would fill the disk
    python scripts/bench_train.py shards --shape 7b --gpus 2   FSDP2, float32 master weights
    python scripts/bench_train.py rows --shape 7b-a1b --gpus 2 --expert-parallel 2 --only ours
                                                               experts that are shared out
    python scripts/bench_train.py long --shape 7b --gpus 2     sequences of 32k tokens shared by 1, 2, ... GPUs

Models are random Qwen2.5 shapes, written to `--models` once. Every measurement runs in processes of its own. Rates are
of the median step, memory is torch's peak of allocated memory. MFU is of the dense bf16 datasheet peak.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

SHAPES: dict[str, dict[str, Any]] = {
    "135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "tie_word_embeddings": True, "vocab_size": 49_152,
    },
    "0.5b": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 151_936,
    },
    "3b": {
        "hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 151_936,
    },
    "7b": {
        "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "tie_word_embeddings": False, "vocab_size": 152_064,
    },
    "7b-a1b": {  # a mixture of experts, in widths of Qwen3-30B-A3B
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 20,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 64,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": False, "vocab_size": 151_936,
    },
    "30b-a3b": {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": False, "vocab_size": 151_936,
    },
}  # fmt: skip
WARM_UP = 2
"""Steps before those that count: they compile."""
LEARNING_RATE = 1e-5


# ---------------------------------------------------------------------- data and models


def model_folder(models: Path, shape: str, weights: str = "files") -> Path:
    """A random model of this shape in bfloat16, written where there is none yet; with ``weights`` "random" its config
    alone."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

    folder = models / (shape if weights == "files" else f"{shape}-config")
    if (folder / "config.json").is_file():
        return folder
    torch.manual_seed(0)
    kind = Qwen3MoeConfig if "num_experts" in SHAPES[shape] else Qwen2Config
    config = kind(**SHAPES[shape], max_position_embeddings=32_768, rope_theta=1e6)
    if weights == "random":
        config.save_pretrained(folder)
        return folder
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def steps_of(args: argparse.Namespace) -> list[list[tuple[list[int], list[bool]]]]:
    """Rows of token ids and loss masks, for each step: equal ones, or conversations."""
    import torch

    total = WARM_UP + args.steps
    if args.data is None:
        generator = torch.Generator().manual_seed(0)
        shape = (total, args.rows, args.length)
        ids = torch.randint(10_000, shape, generator=generator).tolist()
        return [[(row, [True] * args.length) for row in step] for step in ids]
    from transformers import AutoTokenizer

    from posttrain.data.samples import RenderConversations, conversation_shards
    from posttrain.data.stream import render_all

    render = RenderConversations(AutoTokenizer.from_pretrained(args.tokenizer), args.length, "drop", {})
    rows = [row for row in render_all(conversation_shards(args.data), render) if not row.left_out]
    rows = rows * (total * args.rows // len(rows) + 1)
    return [
        [([int(i) for i in row.ids], [bool(m) for m in row.mask]) for row in rows[step * args.rows :][: args.rows]]
        for step in range(total)
    ]


# ---------------------------------------------------------------------- measurements, each in a process of its own


def fill_random(model: Any, source: Any, seed: int, **_: Any) -> None:
    """Give the parameters random values, in the place of ``posttrain.models.weights.load_weights``."""
    import torch

    from posttrain.models import lora
    from posttrain.models.shards import copy_held

    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.fill_(1.0)
    for parameter, value in lora.initial(model, seed):
        copy_held(parameter, value)


def train_ours(args: argparse.Namespace, rank: int) -> dict[str, Any]:
    """Steps of a ``TrainWorker``, as `posttrain sft` runs them."""
    import torch

    from posttrain.algos.reduce import token_weights
    from posttrain.config import TrainConfig
    from posttrain.data.pack import PackedBatch, place
    from posttrain.models.load import ModelSource
    from posttrain.train.spec import LossSpec, WorkerSpec
    from posttrain.train.worker import TrainWorker

    train = {
        "param_dtype": args.param_dtype, "attention": args.attention, "compile": args.compile,
        "activation_checkpointing": args.checkpointing, "sequence_parallel": args.sequence_parallel,
        "expert_parallel": args.expert_parallel,
        "reduce_gradients": args.reduce, "gather_weights": args.gather,
        "optim": {"lr": LEARNING_RATE, "betas": (0.9, 0.999), "weight_decay": 0.0}, "lora": {"rank": args.lora_rank},
    }  # fmt: skip
    spec = WorkerSpec(
        ModelSource(str(args.model)), "cuda", "bfloat16", 0, 1.0, TrainConfig.model_validate(train), total_steps=1000
    )
    worker = TrainWorker(spec, rank, args.gpus)
    start = time.perf_counter()
    loader = mock.patch("posttrain.train.worker.load_weights", fill_random)
    compiler, of_torch = mock.patch("torch.compile", lambda forward, **_: of_torch(forward)), torch.compile
    with (
        loader if args.weights == "random" else nullcontext(),
        compiler if args.compile_for == "first-length" else nullcontext(),
    ):
        metadata = worker.setup("127.0.0.1", args.port, 300.0)
    loaded = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    seconds, losses, tokens, flops = [], [], [], []
    ranks = args.gpus // args.sequence_parallel
    for index, step in enumerate(steps_of(args)):
        batch = PackedBatch.from_sequences([ids for ids, _ in step], [mask for _, mask in step])
        batch.loss_weights = token_weights(batch.loss_mask, batch.cu_seqlens, "token-mean")
        shards = place(batch.lengths, ranks=ranks, token_budget=args.tokens_per_microbatch).shards(batch)
        if args.profile and index == WARM_UP:
            profile(
                lambda shards=shards: worker.update(shards[rank // args.sequence_parallel], LossSpec()), args.profile
            )
            continue
        torch.cuda.synchronize()
        result = worker.update(shards[rank // args.sequence_parallel], LossSpec())
        seconds.append(result.maxima["seconds"])
        loss = torch.tensor(result.sums["loss"], device="cuda")
        torch.distributed.all_reduce(loss)  # each rank has a part of the sum
        losses.append(float(loss))
        flops.append(result.sums["flops"])
        tokens.append(batch.num_tokens)
    torch.distributed.destroy_process_group()
    rates = [n / s for n, s in zip(tokens, seconds, strict=True)][WARM_UP:]
    work = [f / s for f, s in zip(flops, seconds, strict=True)][WARM_UP:]
    return {
        "what": f"posttrain, {metadata['attention']}, compiled for {args.compile_for.replace('-', ' ')}",
        "tokens_per_s_gpu": statistics.median(rates) / args.gpus,
        "mfu": statistics.median(work) / metadata["peak_flops"],
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "losses": losses,
        "seconds": seconds,
        "load_s": loaded,
    }


def profile(step: Any, file: str) -> None:
    """One step under the profiler: a table of kernels on stderr, the trace in ``file``."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        step()
    print(
        recorded.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=90),
        file=sys.stderr,
    )
    recorded.export_chrome_trace(file)


def train_trl(args: argparse.Namespace) -> dict[str, Any]:
    """The same rows through TRL's SFTTrainer with Liger's kernels."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from posttrain.train.flops import model_flops, peak_flops

    steps = steps_of(args)
    rows = [
        {"input_ids": ids, "labels": [i if m else -100 for i, m in zip(ids, mask, strict=True)]}
        for step in steps
        for ids, mask in step
    ]
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, attn_implementation=args.attention, device_map="cuda"
    )
    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            times.append(time.perf_counter() - self.start)

    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    blank = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")),
        pad_token="<pad>", eos_token="<eos>",
    )  # fmt: skip
    flat = args.attention.startswith("flash")
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir="/tmp/posttrain-bench/trl", max_steps=len(steps), logging_steps=1, save_strategy="no",
            report_to="none", per_device_train_batch_size=args.peer_rows,
            gradient_accumulation_steps=args.rows // args.peer_rows, learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant", optim="adamw_torch_fused", bf16=True,
            gradient_checkpointing=args.checkpointing == "full", max_length=None, use_liger_kernel=True,
            padding_free=flat, max_grad_norm=1.0, weight_decay=0.0,
            dataset_kwargs={"skip_prepare_dataset": True}, shuffle_dataset=False,
            train_sampling_strategy="sequential", dataloader_num_workers=2,
            router_aux_loss_coef=0.0,  # as ours has it; TRL would take that of a mixture's config
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=blank,
        callbacks=[Clock()],
    )  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    flops = model_flops(model)
    lengths = [[len(ids) for ids, _ in step] for step in steps]
    measured = list(zip(lengths, times, strict=True))[WARM_UP:]
    peak = peak_flops(torch.device("cuda"))
    assert peak is not None
    return {
        "what": f"TRL + Liger, {args.attention}, {'padding-free' if flat else 'padded'}, {args.peer_rows} rows at once",
        "tokens_per_s_gpu": statistics.median(sum(n) / s for n, s in measured),
        "mfu": statistics.median(flops.training(n) / s for n, s in measured) / peak,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "seconds": times,
    }


def head(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Loss and backward pass of the output head alone: time, and memory beyond inputs, weight and their gradients.
    Liger's is among them where it is installed."""
    import torch

    from posttrain.models import logprobs
    from posttrain.models.logprobs import token_logprobs, tokenwise_loss

    class InTheirType(logprobs._Gradients):
        """Adds the head's gradient up in bfloat16, for comparison."""

        def __init__(self, hidden: Any, head: Any, temperature: float, needed: tuple[bool, ...]) -> None:
            super().__init__(hidden, head, temperature, (needed[0], False))
            self._of_head = torch.zeros_like(head)

    out = []
    for size, vocabulary in ((896, 151_936), (3584, 152_064)):
        count = 32_768
        hidden = torch.randn(count, size, device="cuda", dtype=torch.bfloat16).requires_grad_()
        weight = (torch.randn(vocabulary, size, device="cuda") * 0.02).bfloat16().requires_grad_()
        targets = torch.randint(vocabulary, (count,), device="cuda")

        def ours(hidden: Any = hidden, weight: Any = weight, targets: Any = targets) -> Any:
            return tokenwise_loss(hidden, weight, targets, 1.0, lambda x, _, part: -x.sum() / len(targets))[0]

        def rounded(ours: Any = ours) -> Any:
            with mock.patch.object(logprobs, "_Gradients", InTheirType):
                return ours()

        def recomputed(hidden: Any = hidden, weight: Any = weight, targets: Any = targets) -> Any:
            return -token_logprobs(hidden, weight, targets)[0].mean()

        def ligers(hidden: Any = hidden, weight: Any = weight, targets: Any = targets) -> Any:
            from liger_kernel.ops import fused_linear_cross_entropy as liger

            return liger.LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, targets)[0]

        losses = {
            "posttrain, any loss": recomputed,
            "posttrain, loss of tokens": ours,
            "the same, head's gradient summed in bfloat16": rounded,
        }
        if find_spec("liger_kernel"):
            losses["Liger"] = ligers
        for name, loss in losses.items():
            times = []
            for _ in range(8):
                hidden.grad = weight.grad = None
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                start = time.perf_counter()
                value = loss()
                value.backward()
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            gradients = 2 * (hidden.numel() + weight.numel())
            extra = torch.cuda.max_memory_allocated() - before - gradients
            out.append({
                "what": f"{name}, hidden {size}", "ms": 1e3 * statistics.median(times[3:]), "extra_gib": extra / 2**30,
                "loss": float(value),
            })  # fmt: skip
    return out


def experts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A layer's experts alone, forward and backward pass: ours beside those of transformers, compiled and not."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from posttrain.models.load import implementations
    from posttrain.train.expert_parallel import expert_modules

    device, wait = ("cuda", torch.cuda.synchronize) if torch.cuda.is_available() else ("cpu", lambda: None)
    config = Qwen3MoeConfig(**SHAPES[args.shape] | {"num_hidden_layers": 1})
    ours = implementations(config)["experts_implementation"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layer = expert_modules(model)[0].to_empty(device=device)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens, width, k = args.tokens_per_microbatch, config.hidden_size, config.num_experts_per_tok
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16).requires_grad_()
    chosen = torch.rand(tokens, config.num_experts, device=device).topk(k).indices
    weights = torch.rand(tokens, k, device=device, dtype=torch.bfloat16).requires_grad_()
    upstream = torch.randn_like(hidden)
    # Three matrices of each expert, once forward and twice backward.
    work = 3 * 2 * 3 * tokens * k * width * config.moe_intermediate_size
    out = []
    for name, implementation in (("ours", ours), ("transformers", "grouped_mm")):
        for compiled in (False, True):
            layer.config._experts_implementation = implementation
            torch._dynamo.reset()
            forward = torch.compile(layer.forward, dynamic=True) if compiled else layer.forward
            times = []
            for _ in range(args.steps + 5):
                layer.zero_grad()
                wait()
                start = time.perf_counter()
                forward(hidden, chosen, weights).backward(upstream)
                wait()
                times.append(time.perf_counter() - start)
            seconds = statistics.median(times[5:])
            what = f"experts, {name}, {'compiled' if compiled else 'eager'}, {tokens} tokens"
            out.append({"what": what, "ms": 1e3 * seconds, "tflops": work / seconds / 1e12})
    return out


# ---------------------------------------------------------------------- the driver


def measure(args: argparse.Namespace, what: str, **changes: Any) -> dict[str, Any]:
    """Run one measurement in ``gpus`` processes; what its rank 0 says."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    values = vars(args) | {"measure": what, "port": port} | changes
    options = [f"--{k.replace('_', '-')}={v}" for k, v in values.items() if v is not None and k != "command"]
    ranks = values["gpus"] if what == "ours" else 1
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(ranks)))).split(",")
    processes = []
    for rank in range(ranks):
        env = os.environ | {"CUDA_VISIBLE_DEVICES": devices[rank], "NCCL_NVLS_ENABLE": "0"}
        command = [sys.executable, __file__, args.command, *options, f"--rank={rank}"]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [p.communicate(timeout=900)[0] for p in processes]
    if any(p.returncode for p in processes):
        return {"what": f"{what}: failed"}
    result: dict[str, Any] = json.loads(outputs[0].strip().splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["head", "experts", "rows", "chats", "shards", "long"])
    parser.add_argument("--shape", choices=list(SHAPES), default="0.5b")
    parser.add_argument("--models", type=Path, default=Path("/tmp/posttrain-bench"))
    parser.add_argument("--model", type=Path, help="a model's folder, instead of a random one of --shape")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rows", type=int, default=8, help="in a step, over all GPUs")
    parser.add_argument("--length", type=int, default=8192, help="of a row; of the longest conversation")
    parser.add_argument("--steps", type=int, default=6, help="that count")
    parser.add_argument("--tokens-per-microbatch", type=int, default=8192)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--compile", default="auto")
    parser.add_argument("--compile-for", choices=["any-length", "first-length"], default="any-length")
    parser.add_argument("--checkpointing", default="none", help="TRL checkpoints all layers with full, else none")
    parser.add_argument("--param-dtype", default="bfloat16")
    parser.add_argument("--lora-rank", type=int, help="train adapters of this rank")
    parser.add_argument("--weights", choices=["files", "random"], default="files", help="random: made in memory")
    parser.add_argument("--reduce", default="microbatch")
    parser.add_argument("--gather", default="pass")
    parser.add_argument("--sequence-parallel", type=int, default=1)
    parser.add_argument("--expert-parallel", type=int, default=1)
    parser.add_argument("--data", help="chats: a parquet file of SFT rows")
    parser.add_argument("--tokenizer", help="chats: a tokenizer's folder")
    parser.add_argument("--peer-rows", type=int, default=1, help="rows that TRL runs at once")
    parser.add_argument("--peer-attention", default="sdpa", help="TRL's attn_implementation")
    parser.add_argument("--only", choices=["ours", "trl"], help="one side, for two GPUs side by side")
    parser.add_argument(
        "--profile", help="write a trace of one step to this file, and a table of its kernels to stderr"
    )
    for hidden in ("--measure", "--rank", "--port"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()

    if args.measure:
        run = {"ours": lambda: train_ours(args, int(args.rank)), "trl": lambda: train_trl(args)}[args.measure]
        args.port = int(args.port)
        print(json.dumps(run()))
        return
    if args.command == "experts" and "num_experts" not in SHAPES[args.shape]:
        parser.error(f"--shape {args.shape} has no experts; hint: --shape 7b-a1b")
    if args.command in ("head", "experts"):
        results = {"head": head, "experts": experts}[args.command](args)
    else:
        if args.model is None:
            make = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import bench_train as b; "
            make += "from pathlib import Path; "
            make += f"print(b.model_folder(Path({str(args.models)!r}), {args.shape!r}, {args.weights!r}))"
            made = subprocess.run([sys.executable, "-c", make], check=True, stdout=subprocess.PIPE, text=True)
            args.model = Path(made.stdout.splitlines()[-1])
        results = []
        if args.command in ("rows", "chats"):
            if args.only != "trl":
                results.append(measure(args, "ours"))
            if args.only != "ours":
                results.append(measure(args, "trl", attention=args.peer_attention))
        elif args.command == "shards":
            results.append(measure(args, "ours", param_dtype="float32"))
        else:
            for size in (2**i for i in range(args.gpus.bit_length())):
                one = measure(args, "ours", param_dtype="float32", sequence_parallel=size)
                results.append(one | {"what": f"{one['what']}, {size} GPUs a sequence"})
    report(results)


def report(results: list[dict[str, Any]]) -> None:
    for result in results:
        losses = result.pop("losses", [])
        seconds = result.pop("seconds", [])
        shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in result.items()}
        print(json.dumps(shown | {"losses": [round(x, 4) for x in losses], "seconds": [round(x, 3) for x in seconds]}))


if __name__ == "__main__":
    main()
