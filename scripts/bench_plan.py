"""Predicted against measured: the figures of docs/benchmarks.md beside what `posttrain plan` reckons for them.

    python scripts/bench_plan.py

Needs no GPU: the measured figures are in the tables below, with the settings that they were measured with. A new
measurement is a new row; no number of a row is used for that row alone. ``tests/unit/plan/test_plan.py`` holds the plan
to the rows that are within the bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.config import Config, EngineName, RolloutConfig, TrainConfig
from posttrain.core.machines import Machine, gpu_named
from posttrain.core.sizes import GIB
from posttrain.data.bins import assign
from posttrain.engines.choice import EngineChoice
from posttrain.plan import calibration as known
from posttrain.plan import speed
from posttrain.plan.batch import assumed_lengths, batch_of
from posttrain.plan.known import known_models
from posttrain.plan.layout import Kernels, Layout, Shapes, lay_out, moments, sync_budget
from posttrain.plan.memory import EngineMemory, Trainer, total
from posttrain.plan.shape import ModelShape, shape_of
from posttrain.plan.speed import RankWork

MEMORY_BOUND, TIME_BOUND = 0.05, 0.20
"""What a plan is meant to meet, as a share of what was measured."""

QWEN: dict[str, dict[str, Any]] = {
    "0.5b": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 151_936,
    },
    "7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False, "vocab_size": 152_064,
    },
}  # fmt: skip
"""Shapes of Qwen2.5."""


def shape(name: str) -> ModelShape:
    """Of ``QWEN``."""
    return shape_of(QWEN[name], name)


# ---------------------------------------------------------------------- optimizer steps


@dataclass(frozen=True)
class Update:
    """A training step that was measured on H200. Lengths are of the whole step, over all GPUs."""

    what: str
    model: str
    lengths: tuple[int, ...]
    budget: int
    """train.tokens_per_microbatch"""
    memory_gib: float | None
    """Most that torch had allocated"""
    tokens_per_s: float | None
    """A GPU"""
    train: dict[str, Any] = field(default_factory=dict)
    gpus: int = 1
    compiled: bool = True
    repeats_heads: bool = False
    """Attention of core torch, which had no grouped queries"""
    loss_share: float = 1.0
    remark: str = ""
    """What of the settings is not recorded, or differs from the code of today"""

    @property
    def work(self) -> RankWork:
        """Of the rank with most tokens."""
        ranks = self.gpus // self.train.get("sequence_parallel", 1)
        placed = assign(self.lengths, ranks=ranks, token_budget=self.budget)
        works = [RankWork(tuple(tuple(self.lengths[i] for i in m) for m in parts), self.loss_share) for parts in placed]
        return max(works, key=lambda work: work.tokens)

    @property
    def trainer(self) -> Trainer:
        work = self.work
        return Trainer(
            "actor", shape(self.model), TrainConfig.model_validate(self.train), self.gpus, 2, True, self.compiled,
            self.repeats_heads, work.largest, len(work.micro_batches),
        )  # fmt: skip

    def predicted_memory(self) -> float:
        """GiB"""
        return total(self.trainer.update()) / GIB

    def predicted_speed(self) -> float:
        """Tokens a second and GPU."""
        seconds = speed.update_seconds(self.trainer, machine(self.gpus), self.work).total
        return sum(self.lengths) / seconds / self.gpus


def machine(gpus: int) -> Machine:
    """So many H200."""
    return Machine(gpu_named("h200"), gpus)


BFLOAT16 = {"param_dtype": "bfloat16"}
SHARED = {"sequence_parallel": 2, "activation_checkpointing": "selective"}
_EPISODE = 292
"""Tokens of an episode in the LoRA row, counted: 36 of Qwen2.5's template and the prompt, and 256"""
_ANSWERED = 256
"""Tokens with loss of an episode"""

UPDATES = [
    Update("7B, rows of 8k, bf16", "7b", (8192,) * 8, 8192, 93.0, 12_450, BFLOAT16),
    Update("0.5B, rows of 8k, 32k at once, bf16", "0.5b", (8192,) * 8, 32768, 34.9, 115_500, BFLOAT16),
    Update(
        "0.5B, conversations, bf16", "0.5b", (512,) * 128, 16384, 19.9, 157_700, BFLOAT16,
        remark="micro-batches of 16k are inferred, not recorded; lengths neither",
    ),
    Update("7B, float32, 2 GPUs, rows of 8k", "7b", (8192,) * 8, 8192, 95.5, 10_150, {}, 2),
    Update("the same, reduce step", "7b", (8192,) * 8, 8192, 109.7, 10_300, {"reduce_gradients": "step"}, 2),
    Update("the same, gather step", "7b", (8192,) * 8, 8192, 107.4, 10_750, {"gather_weights": "step"}, 2),
    Update(
        "the same, both", "7b", (8192,) * 8, 8192, 121.6, 10_490,
        {"gather_weights": "step", "reduce_gradients": "step"}, 2,
    ),
    Update("7B, a row of 32k on 2 GPUs, selective", "7b", (32768,), 32768, 98.7, 7_070, SHARED, 2),
    Update(
        "the same, 2 rows, gather step", "7b", (32768,) * 2, 32768, 124.1, 7_200, SHARED | {"gather_weights": "step"}, 2
    ),
    Update(
        "0.5B SFT, float32", "0.5b", (271,) * 256, 32768, 31.6, 157_600, {}, 1, True, True, 0.157,
        remark="the mean of 144k, 162k and 167k on three machines: the host's speed shows",
    ),
    Update("the same, 2 GPUs", "0.5b", (271,) * 256, 32768, 22.2, 111_300, {}, 2, True, True, 0.157),
    Update(
        "0.5B GRPO, 256 episodes, float32", "0.5b", (462,) * 256, 32768, 37.9, 163_000, {}, 1, True, True,
        _ANSWERED / 462,
    ),
    Update("the same, 2 GPUs", "0.5b", (462,) * 256, 32768, 34.3, 144_600, {}, 2, True, True, _ANSWERED / 462),
    Update(
        "0.5B GRPO, 128 episodes, float32", "0.5b", (270,) * 128, 16384, 20.4, 77_800, {}, 1, True, True,
        _ANSWERED / 270,
    ),
    Update(
        "0.5B GRPO, LoRA of rank 16", "0.5b", (_EPISODE,) * 128, 16384, 14.6, None, {"lora": {"rank": 16}}, 1, True,
        True, _ANSWERED / _EPISODE, remark="lengths are counted, not recorded",
    ),
]  # fmt: skip


# ---------------------------------------------------------------------- phases of rl, and a weight update


@dataclass(frozen=True)
class Timed:
    """Seconds of a phase, as the driver saw it."""

    what: str
    measured: float
    predicted: float


def phases() -> Iterator[Timed]:
    """Of tests/gpu/test_rl_gpu.py (128 episodes), scripts/bench_gpu.py (256) and scripts/bench_rollout_gpu.py (7B)."""
    gpu = machine(1)
    for what, gpus, seconds in (("256 episodes", 1, 0.27), ("256 episodes", 2, 0.16), ("128 episodes", 1, 0.106)):
        rl = replace(next(update for update in UPDATES if f"GRPO, {what}" in update.what), gpus=gpus)
        frozen = replace(rl.trainer, role="reference", trainable=False)
        found = speed.forward_seconds(frozen, machine(gpus), rl.work).total + known.CALL_S
        yield Timed(f"ref: {what}, {gpus} GPU{'s' * (gpus > 1)}", seconds, found)
    rl = next(update for update in UPDATES if "GRPO, 128 episodes" in update.what)
    one = rl.trainer
    critic = replace(one, role="critic", shape=replace(one.shape, values=True))
    for what, trainer, forward, update in (("actor", one, 0.17, 0.54), ("critic", critic, 0.17, 0.42)):
        found = speed.forward_seconds(trainer, gpu, rl.work).total + known.CALL_S
        yield Timed(f"PPO, 128 episodes: {what}, forward", forward, found)
        yield Timed(f"the same: {what}, update", update, speed.update_seconds(trainer, gpu, rl.work).total)
    for what, engine, episodes, response, seconds in (
        ("embedded engine, 128 episodes of 256 tokens", "hf", 128, 256, 6.6),
        ("embedded engine, 256 of 256", "hf", 256, 256, 8.91),
        ("SGLang, 128 of up to 512, with a tool", "sglang", 128, 512, 1.45),
        ("SGLang, 1,024 of 394, one turn", "sglang", 1024, 394, 5.05),
    ):
        rollout = RolloutConfig.model_validate({"engine": engine, "memory_fraction": 0.3})
        memory = EngineMemory(shape("0.5b"), rollout, 2, gpu.memory, engine)
        found = speed.generation_seconds(
            memory, gpu, episodes=episodes, prompt=36, response=response, longest=response
        ).total
        yield Timed(f"gen: {what}", seconds, found)
    yield Timed("sync: hf", 0.23, speed.sync_seconds(one, gpu, "device", "hf").total)
    smollm2 = "./models/smollm2-135m-instruct"
    small = replace(one, shape=shape_of(known_models()[smollm2], smollm2))
    for engine, seconds in (("sglang", 0.31), ("vllm", 0.38)):  # of runs; a script that only updates takes a third
        found = speed.sync_seconds(small, gpu, "device", engine).total
        yield Timed(f"SmolLM2, sync: {engine}", seconds, found)
    large = Trainer("actor", shape("7b"), TrainConfig.model_validate(BFLOAT16))
    for engine, sampled in (("sglang", 3.46), ("vllm", 3.27)):
        rollout = RolloutConfig.model_validate({"engine": engine})
        memory = EngineMemory(large.shape, rollout, 2, gpu.memory, engine)
        found = speed.generation_seconds(memory, gpu, episodes=256, prompt=128, response=256, longest=256)
        yield Timed(f"7B, gen: {engine}, 256 of 256 tokens", sampled, found.total)


@dataclass(frozen=True)
class Used:
    """GiB of a GPU, by all processes."""

    what: str
    measured: float
    predicted: float


def in_turns() -> Iterator[Used]:
    """tests/gpu/test_engines_gpu.py (GRPO at 0.5B) and scripts/bench_rollout_gpu.py (7B): engine and trainer in
    turns."""
    for engine, amid_update, sampling in (("sglang", 11.2, 65.2), ("vllm", 10.7, 71.5)):
        small = _layout("0.5b", engine, {}, {"memory_fraction": 0.3, "max_response_tokens": 512})
        budget = sync_budget(small)
        assert budget is not None
        yield Used(f"0.5B, {engine}: amid a weight update", amid_update, budget / GIB)
        large = _layout("7b", engine, BFLOAT16, {"max_prompt_tokens": 128, "max_response_tokens": 3968})
        found = next(moment.total for moment in moments(large) if moment.name == "sample")
        yield Used(f"7B, {engine}: sampling, half of the GPU", sampling, found / GIB)


def _layout(model: str, engine: EngineName, train: dict[str, Any], rollout: dict[str, Any]) -> Layout:
    cfg = Config.model_validate(
        {
            "command": "rl", "data": {"batch_size": 16}, "train": {"offload": True} | train,
            "rollout": {"engine": engine, "sleep": True} | rollout,
        }
    )  # fmt: skip
    kernels = Kernels(compiled=True, itemsize=2, repeats_heads=True, auto_engine=EngineChoice(engine, "measured"))
    lengths = assumed_lengths(cfg)
    return lay_out(cfg, Shapes(shape(model)), machine(1), kernels, batch_of(cfg, lengths, 20), lengths)


# ---------------------------------------------------------------------- the table


def off(predicted: float, measured: float) -> float:
    """How far a prediction is off, as a share of what was measured."""
    return predicted / measured - 1.0


def main() -> None:
    print("| optimizer steps | GiB: measured | predicted | off | tokens/s a GPU: measured | predicted | off |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in UPDATES:
        cells = [row.what + (" (*)" if row.remark else "")]
        for measured, predicted, digits in (
            (row.memory_gib, row.predicted_memory(), 1), (row.tokens_per_s, row.predicted_speed(), 0),
        ):  # fmt: skip
            if measured is None:
                cells += ["", "", ""]
            else:
                cells += [f"{measured:,.{digits}f}", f"{predicted:,.{digits}f}", f"{off(predicted, measured):+.1%}"]
        print(f"| {' | '.join(cells)} |")
    print()
    for row in UPDATES:
        if row.remark:
            print(f"(*) {row.what}: {row.remark}")
    print(
        "\n| phases of `rl`, 0.5B on one GPU, or 7B | seconds: measured | predicted | off |\n| --- | --- | --- | --- |"
    )
    for phase in phases():
        shown = f"{phase.measured:.2f} | {phase.predicted:.2f} | {off(phase.predicted, phase.measured):+.0%}"
        print(f"| {phase.what} | {shown} |")
    print("\n| a GPU, engine and trainer in turns | GiB: measured | predicted | off |\n| --- | --- | --- | --- |")
    for used in in_turns():
        shown = f"{used.measured:.1f} | {used.predicted:.1f} | {off(used.predicted, used.measured):+.1%}"
        print(f"| {used.what} | {shown} |")


if __name__ == "__main__":
    main()
