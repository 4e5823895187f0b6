"""What docs/models.md tells of an architecture, each cell a check on a tiny model of it.

A check returns nothing where the feature is right, and fails otherwise. Whether a feature is refused is asked of the
product first, as a command would before a run.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from posttrain.config import Config, LoraConfig, RolloutConfig
from posttrain.core.errors import UserError
from posttrain.core.types import SamplingParams
from posttrain.data.pack import PackedBatch
from posttrain.data.template import ChatTemplate, hidden_tools
from posttrain.engines.base import EngineSpec
from posttrain.engines.hf import HFSampler
from posttrain.models import lora
from posttrain.models.attention import Ragged
from posttrain.models.attention_kernels import choose
from posttrain.models.builtin import builtin_tokenizer
from posttrain.models.export import save_text_side, save_whole
from posttrain.models.load import ModelSource, build, load_model, locate
from posttrain.models.weights import as_stored, load_weights, materialize
from posttrain.runs.episodes import tool_parser
from posttrain.runs.preflight import check_model, check_use
from posttrain.tools.formats import PARSERS
from posttrain.train.model import PackedLM
from posttrain.train.parallel import parallelize
from posttrain.weight_sync.sender import WeightSender
from tests.helpers.architectures import ARCHITECTURES
from tests.helpers.call_texts import ONE_CALL, ROME, TOOLS
from tests.helpers.ports import free_ports
from tests.helpers.saved import save_shards

CPU = torch.device("cpu")
SDPA = choose("sdpa", CPU, torch.float32)
LENGTHS = (9, 2, 31, 17)
RECORDED = Path(__file__).parents[2] / "docs" / "models.json"
Grads = dict[str, Tensor]
Cell = dict[str, str]

FEATURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "packed": ("packed", "packed sequences give what each gives alone: log-probabilities and gradients", {}),
    "sequence_parallel": (
        "sequence parallel", "the same with 2 workers that share sequences",
        {"train": {"sequence_parallel": 2}, "cluster": {"workers": 2}},
    ),
    "compiled": ("compiled", "the same with compiled layers", {"train": {"compile": "on"}}),
    "checkpointing": (
        "checkpointing", "the same with activation checkpointing, selective and full",
        {"train": {"activation_checkpointing": "full"}},
    ),
    "lora": (
        "LoRA", "adapters begin as the base, all get gradients, and merge to what they gave",
        {"train": {"lora": {"rank": 3}}},
    ),
    "fsdp": ("FSDP2", "the first column with 2 workers that share weights", {"cluster": {"workers": 2}}),
    "tools": ("tool calls", "the chat template shows tools, and a call in its format is read", {}),
    "vllm": (
        "vLLM", "an update sends vLLM the tensors of published checkpoints: same names, shapes, values",
        {"rollout": {"engine": "vllm"}},
    ),
    "sglang": ("SGLang", "the same for SGLang", {"rollout": {"engine": "sglang"}}),
    "merge": ("merge", "a checkpoint becomes a folder that transformers loads, with the same weights", {}),
    "embedded": (
        "embedded engine", "it samples with the trainer's log-probabilities, also after a weight update",
        {"rollout": {"engine": "hf"}},
    ),
}  # fmt: skip
"""key -> (heading, what is checked, config that asks for it)"""


class Bench:
    """A tiny model of one architecture, and what transformers says of it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.architecture = ARCHITECTURES[name]
        self.folder, self.source = folder / "model", ModelSource(str(folder / "model"))
        self.architecture.save(self.folder)
        self.unread = True
        generator = torch.Generator().manual_seed(1)
        self.ids = [torch.randint(1, 1000, (n,), generator=generator) for n in LENGTHS]
        self.batch = PackedBatch.from_sequences(self.ids, [[True] * len(s) for s in self.ids])
        self.batch.loss_weights = self.batch.loss_mask.float()

    @cached_property
    def alone(self) -> tuple[Tensor, Grads]:
        """Log-probabilities [N] of each sequence alone, by plain transformers with its eager attention, and the
        gradients of minus their sum."""
        model = AutoModelForCausalLM.from_pretrained(self.folder, attn_implementation="eager", dtype=torch.float32)
        rows = [model(s[None], use_cache=False).logits[0, :-1].log_softmax(-1) for s in self.ids]
        logprobs = torch.cat([row.gather(1, s[1:, None])[:, 0] for row, s in zip(rows, self.ids, strict=True)])
        (-logprobs.sum()).backward()
        return logprobs.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    def scored(self, lm: PackedLM, ids: Sequence[Tensor] | None = None) -> Tensor:
        """Log-probabilities [N] of packed sequences."""
        batch = self.batch
        if ids is not None:
            batch = PackedBatch.from_sequences(ids, [[True] * len(s) for s in ids])
        predict = batch.loss_mask.nonzero().flatten()
        ragged = Ragged.build(batch.cu_seqlens, CPU, SDPA)
        logprobs: Tensor = lm(batch.input_ids, batch.position_ids, predict - 1, batch.input_ids[predict], ragged, 1.0)[
            0
        ]
        return logprobs

    def expect(self, logprobs: Tensor, grads: Mapping[str, Tensor]) -> None:
        """Compare with each sequence alone."""
        expected, expected_grads = self.alone
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=2e-5)
        assert grads.keys() == expected_grads.keys()
        for name, grad in expected_grads.items():
            off = float((grads[name] - grad).abs().max()) / (float(grad.abs().max()) + 1e-3)
            assert off < 1e-4, f"the gradient of {name} is off by {off:.2g} of its largest element"

    def packed(self, **how: Any) -> None:
        """Compare one packed row, of a model to which ``parallelize`` does what ``how`` says."""
        options = {"dtype": torch.float32, "activation_checkpointing": "none", "compiled": False} | how
        lm = parallelize(PackedLM(load_model(self.source, dtype=torch.float32)), None, **options)
        logprobs = self.scored(lm)
        (-logprobs.sum()).backward()
        grads = {name: p.grad for name, p in lm.model.named_parameters() if p.grad is not None}
        self.expect(logprobs.detach(), grads)


# ---------------------------------------------------------------------- the checks


def packed(bench: Bench) -> None:
    bench.packed()


def checkpointing(bench: Bench) -> None:
    bench.packed(activation_checkpointing="selective")
    bench.packed(activation_checkpointing="full")


def compiled(bench: Bench) -> None:
    torch._dynamo.reset()
    compile_ = torch.compile
    try:
        # Code for the graphs takes minutes to make for all architectures. What is traced is decided before it.
        torch.compile = partial(compile_, backend="eager")
        bench.packed(compiled=True)
    finally:
        torch.compile = compile_


def adapters(bench: Bench) -> None:
    model = build(bench.source, dtype=torch.float32)
    lora.inject(model, LoraConfig(rank=3, alpha=6), dtype=torch.float32)
    materialize(model, CPU)
    load_weights(model, bench.source, 0)
    lm = PackedLM(model).eval()
    first = bench.scored(lm)
    torch.testing.assert_close(first.detach(), bench.alone[0], rtol=0, atol=2e-5)
    (-first.sum()).backward()
    ours = {name: p for name, p in model.named_parameters() if lora.base_name(name) is None}
    still = [name for name, p in ours.items() if ".lora_B." in name and (p.grad is None or not p.grad.any())]
    assert ours
    assert not still
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in ours.values():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.05
        shaken = bench.scored(lm)
        assert float((shaken - first).abs().max()) > 1e-2
        place = bench.folder.parent / "lora"
        save_shards(place / "actor", model, None, 1)
        lora.save(model, place / "actor" / "adapter", bench.source, 0, write=True)
        merged = PackedLM(load_model(locate(str(place)), dtype=torch.float32))
        torch.testing.assert_close(bench.scored(merged), shaken, rtol=0, atol=5e-5)
        handed_out = dict(lora.whole_weights(model))
        for name, parameter in merged.model.named_parameters():
            torch.testing.assert_close(handed_out[name], parameter, rtol=0, atol=1e-6)


def tools(bench: Bench, templates: Path | None) -> None:
    kind = bench.architecture.tools
    tokenizer = builtin_tokenizer("tiny")
    if kind == "hermes" and templates is not None:
        tokenizer.chat_template = (templates / "qwen3.jinja").read_text()
    shown = ChatTemplate(tokenizer, {}).text([{"role": "user", "content": "?"}], TOOLS)
    assert not hidden_tools(shown, TOOLS)
    found = tool_parser("auto", tokenizer, TOOLS)
    assert found is PARSERS.get("hermes")
    for name in {"hermes", kind or "hermes"}:
        [call] = PARSERS.get(name).parse(ONE_CALL[name], TOOLS).calls
        assert (call.name, call.arguments) == (ROME.name, ROME.arguments)


def names(bench: Bench) -> None:
    """Compare what a trainer sends with the tensors of a published checkpoint, as transformers writes them."""
    with safe_open(bench.folder / "model.safetensors", "pt") as file:
        published = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    model = load_model(bench.source, dtype=torch.float32)
    sent = dict(as_stored(model, lora.whole_weights(model)))
    assert sent.keys() == published.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in published.items())


def merge(bench: Bench) -> None:
    place = bench.folder.parent / "merge"
    trained = load_model(bench.source, dtype=torch.float32)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter += 0.01
    save_shards(place / "actor", trained, None, 1)
    save_text_side(bench.source, place / "actor" / "huggingface")
    save_whole(locate(str(place)), place / "out", dtype="float32")
    again = AutoModelForCausalLM.from_pretrained(place / "out", dtype=torch.float32)
    expected = dict(trained.named_parameters())
    assert dict(again.named_parameters()).keys() == expected.keys()
    assert all(torch.equal(p, expected[name]) for name, p in again.named_parameters())
    assert load_file(place / "out" / "model.safetensors").keys() == load_file(bench.folder / "model.safetensors").keys()


def embedded(bench: Bench) -> None:
    trainer = PackedLM(load_model(bench.source, dtype=torch.float32))
    prompts = [s.tolist() for s in bench.ids]

    async def main() -> None:
        rollout = RolloutConfig(kv_tokens=2048, max_concurrent=8)
        engine = HFSampler(EngineSpec(bench.source, "cpu", "float32", 0, rollout, [1023], threads=1))
        try:
            for version in range(2):
                if version:
                    with torch.no_grad():
                        for parameter in trainer.parameters():
                            parameter += 0.01 * torch.ones_like(parameter)
                    sender = WeightSender(lora.whole_weights(trainer.model), torch.float32, "host")
                    while (bucket := sender.next(0)) is not None:
                        await engine.load_bucket(bucket)
                    sender.close()
                    await engine.finish_update(version)
                samples = await asyncio.gather(*(engine.generate(p, SamplingParams(12)) for p in prompts))
                whole = [torch.tensor([*p, *s.ids]) for p, s in zip(prompts, samples, strict=True)]
                with torch.no_grad():
                    expected = bench.scored(trainer, whole).split([len(s) - 1 for s in whole])
                scores = await engine.score([s.tolist() for s in whole])
                for prompt, sample, score, wanted in zip(prompts, samples, scores, expected, strict=True):
                    assert sample.version == version
                    torch.testing.assert_close(torch.tensor(score[1:]), wanted, rtol=0, atol=1e-4)
                    found = torch.tensor(sample.logprobs)
                    torch.testing.assert_close(found, wanted[len(prompt) - 1 :], rtol=0, atol=1e-4)
        finally:
            await engine.close()

    asyncio.run(main())


# ---------------------------------------------------------------------- two workers

_WORK = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from safetensors.torch import save_file
from posttrain.config import TrainConfig
from posttrain.data.pack import PackedBatch
from posttrain.models.gather import whole
from posttrain.models.load import ModelSource
from posttrain.train.spec import LossSpec, WorkerSpec
from posttrain.train.worker import TrainWorker

rank = int(sys.argv[1])
for line in sys.stdin:
    folder, kind, port = line.split()
    batch = PackedBatch(**torch.load(Path(folder, "batch.pt"), weights_only=True))
    mine = batch.select([2 * rank, 2 * rank + 1]) if kind == "fsdp" else batch
    train = TrainConfig(sequence_parallel=1 if kind == "fsdp" else 2)
    spec = WorkerSpec(ModelSource(str(Path(folder, "model"))), "cpu", "float32", 0, 1.0, train, threads=1)
    worker = TrainWorker(spec, rank, 2)
    worker.setup("127.0.0.1", int(port), 60.0)
    [column] = worker.logprobs([mine])
    worker._backward(worker._micro_batch(mine), LossSpec())
    found = {name: whole(p.grad).contiguous() for name, p in worker.parameters.items() if p.grad is not None}
    save_file(found | {"": column[mine.loss_mask]}, Path(folder, f"{kind}.{rank}.safetensors"))
    dist.barrier()
    dist.destroy_process_group()
    print(folder, kind, flush=True)
"""


def run_two_workers(benches: Sequence[Bench]) -> None:
    """Let two processes compute what every architecture does with shared weights, and with shared sequences where that
    is not refused."""
    work = [(b, kind) for b in benches for kind in ("fsdp", "sequence_parallel") if refusal(b, kind) is None]
    for bench in benches:
        torch.save({k: v for k, v in vars(bench.batch).items() if v is not None}, bench.folder.parent / "batch.pt")
    ports = free_ports(len(work))
    lines = "".join(f"{b.folder.parent} {kind} {port}\n" for (b, kind), port in zip(work, ports, strict=True))
    pipe = subprocess.PIPE
    ranks = [
        subprocess.Popen([sys.executable, "-c", _WORK, str(rank)], stdin=pipe, stdout=pipe, text=True)
        for rank in range(2)
    ]
    for process in ranks:
        assert process.stdin is not None
        process.stdin.write(lines)
        process.stdin.close()
    for process in ranks:
        assert process.stdout is not None
        done = process.stdout.read()
        assert process.wait(300) == 0, done


def two_workers(bench: Bench, kind: str) -> None:
    """Compare what ``run_two_workers`` found."""
    files = [load_file(bench.folder.parent / f"{kind}.{rank}.safetensors") for rank in range(2)]
    logprobs = [file.pop("") for file in files]
    bench.expect(torch.cat(logprobs) if kind == "fsdp" else logprobs[0], files[0])


# ---------------------------------------------------------------------- cells


def refusal(bench: Bench, feature: str) -> UserError | None:
    """Return what a command says to the feature before its run; None: it goes on."""
    asked = FEATURES[feature][2]
    command = "rl" if "rollout" in asked else "sft"
    cfg = Config.model_validate({"command": command, "model": {"path": str(bench.folder)}} | asked)
    try:
        if bench.unread:  # the same for all features
            check_model(cfg, bench.source, str(bench.folder))
            bench.unread = False
        check_use(cfg, bench.source)
    except UserError as error:
        return error
    return None


CHECKS: dict[str, Callable[[Bench], None]] = {
    "packed": packed, "sequence_parallel": partial(two_workers, kind="sequence_parallel"), "compiled": compiled,
    "checkpointing": checkpointing, "lora": adapters, "fsdp": partial(two_workers, kind="fsdp"),
    "vllm": names, "sglang": names, "merge": merge, "embedded": embedded,
}  # fmt: skip


def check(bench: Bench, feature: str, templates: Path | None) -> Cell:
    """Return a cell: what is right has no reason, what is refused has one and a hint. Fails where neither is so."""
    refused = refusal(bench, feature)
    if refused is not None:
        assert refused.hint
        return {"result": "refused", "reason": refused.message.replace(f"{bench.folder}: ", ""), "hint": refused.hint}
    if feature == "tools":
        tools(bench, templates)
    else:
        CHECKS[feature](bench)
    return {"result": "right"}


def record(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is recorded: the features in words, and a row of each architecture."""
    return {"features": {key: list(words[:2]) for key, words in FEATURES.items()}, "architectures": dict(table)}


def row(bench: Bench, cells: Mapping[str, Cell]) -> dict[str, Any]:
    """Return a row of the recorded table."""
    config = json.loads((bench.folder / "config.json").read_text())
    [name] = config["architectures"]
    return {"class": name, "about": bench.architecture.about, "tools": bench.architecture.tools, "cells": dict(cells)}
