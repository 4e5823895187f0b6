"""Compare `posttrain merge-ckpt` with verl 0.9.1's own merger, on checkpoints that verl's own code wrote.

    python scripts/parity_verl_checkpoint.py

For each case, processes on this CPU (gloo) share a small Qwen2 model by verl's FSDP1 or FSDP2 code and save it with its
``FSDPCheckpointManager``, optimizer and all. Then both merge it: `python -m verl.model_merger`, and ours. verl's part
runs in an environment of its own (``_verl_env``), with its own torch and transformers.

verl's merger rounds to bfloat16, and so does ours here with `--dtype bfloat16`: names must be the same, and tensors bit
by bit. Our float32 folder must be the model's own weights, which were written before they were sharded. Exit code 1:
a difference.

Nothing of verl is patched. It takes a machine without GPU for one with CUDA, so the device mesh is made here as verl's
``create_device_mesh`` makes it, of type "cpu", and FSDP1 is told "cpu" where verl's engine gives the GPU's number.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MODELS = ("untied", "tied", "critic")
SEED = 3


@dataclass(frozen=True)
class Case:
    """One checkpoint."""

    model: str
    """Of ``MODELS``; critic: a token classifier with one label."""
    fsdp: int
    """1 or 2"""
    ranks: int
    replicas: int = 1
    """Above 1: hybrid sharding."""

    @property
    def name(self) -> str:
        hybrid = f", {self.replicas} replicas" if self.replicas > 1 else ""
        return f"{self.model}, FSDP{self.fsdp}, {self.ranks} rank{'s'[: self.ranks > 1]}{hybrid}"

    def folder(self, root: Path) -> Path:
        return root / f"{self.model}-fsdp{self.fsdp}-{self.ranks}x{self.replicas}"


CASES = [
    *(Case(model, fsdp, ranks) for ranks in (1, 2, 4) for fsdp in (1, 2) for model in MODELS),
    *(Case("tied", fsdp, 4, replicas=2) for fsdp in (1, 2)),
]


# ---------------------------------------------------------------------- in verl's environment


def write(root: Path, cases: list[Case], rank: int, ranks: int) -> None:
    """One of the processes that save ``cases``, which are all of ``ranks`` ranks."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{root}/store{ranks}", rank=rank, world_size=ranks)
    for case in cases:
        save(case, case.folder(root))
    dist.barrier()  # one that leaves while others still talk ends them
    dist.destroy_process_group()


def save(case: Case, folder: Path) -> None:
    """Shard the model as verl's engine does, and save it. A collective."""
    import torch
    import torch.distributed as dist
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    from posttrain.models.builtin import builtin_tokenizer

    model = build(case.model)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        torch.save(dict(model.named_parameters()), folder / "weights.pt")
    dist.barrier()
    model = shard(model, case)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    manager = FSDPCheckpointManager(model, optimizer, scheduler, builtin_tokenizer("tiny"))
    manager.save_checkpoint(str(folder / "actor"), global_step=1)


def build(kind: str) -> Any:
    """A small model in float32 with random weights, the same in every process. Few sizes are multiples of 4."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    from posttrain.models.builtin import builtin_config

    config = builtin_config("tiny")
    config.hidden_size, config.intermediate_size = 136, 390
    config.tie_word_embeddings = kind == "tied"
    torch.manual_seed(SEED)
    if kind == "critic":  # as verl's `load_valuehead_model`
        config.num_labels = 1
        model = AutoModelForTokenClassification.from_config(config, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.architectures = [type(model).__name__]  # verl's merger chooses by it
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms, too, are no longer what a new model has
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def shard(model: Any, case: Case) -> Any:
    """As ``FSDPEngine._build_fsdp_module`` and ``create_device_mesh`` of verl do."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from verl.utils.fsdp_utils import apply_fsdp2, get_fsdp_wrap_policy

    if case.replicas == 1:
        mesh = init_device_mesh("cpu", (case.ranks,), mesh_dim_names=("fsdp",))
        strategy = ShardingStrategy.FULL_SHARD
    else:
        shape = (case.replicas, case.ranks // case.replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp"))
        strategy = ShardingStrategy.HYBRID_SHARD
    if case.fsdp == 1:
        policy = get_fsdp_wrap_policy(model)
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=policy,
            sharding_strategy=strategy,
            device_mesh=mesh,
            device_id=torch.device("cpu"),
            use_orig_params=False,
        )
    apply_fsdp2(model, {"mesh": mesh, "reshard_after_forward": True}, {})
    return model


def merge_theirs(root: Path, cases: list[Case]) -> None:
    """`python -m verl.model_merger merge` for each case, in one process."""
    from verl.model_merger.__main__ import main as merger

    for case in cases:
        folder = case.folder(root)
        arguments = ["--local_dir", folder / "actor", "--target_dir", folder / "theirs"]
        sys.argv = ["verl.model_merger", "merge", "--backend", "fsdp", *map(str, arguments)]
        merger()


# ---------------------------------------------------------------------- in ours


def there(*arguments: Any) -> subprocess.Popen[bytes]:
    """This script in verl's environment; what it prints is for a failure alone."""
    from _verl_env import environment, python

    return subprocess.Popen(
        [python(), __file__, *map(str, arguments)],
        env=environment() | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(processes: list[subprocess.Popen[bytes]]) -> None:
    outputs = [process.communicate(timeout=1800)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode:
            sys.stderr.write(output.decode(errors="replace"))
            sys.exit(f"verl's part failed: {' '.join(map(str, process.args))}")


def stored(folder: Path) -> dict[str, Any]:
    """name -> tensor of a folder's safetensors."""
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def difference(ours: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The largest of any number; 0 only where names, types, shapes and all bits are the same, else infinity at least
    where they cannot be compared."""
    import torch

    if ours.keys() != wanted.keys():
        print(f"names differ: {sorted(ours.keys() ^ wanted.keys())}", file=sys.stderr)
        return float("inf")
    largest = 0.0
    for name, tensor in wanted.items():
        mine = ours[name]
        if (mine.dtype, mine.shape) != (tensor.dtype, tensor.shape):
            return float("inf")
        if not torch.equal(mine.view(torch.uint8), tensor.view(torch.uint8)):
            gap = float((mine.double() - tensor.double()).abs().max())
            largest = max(largest, gap or 5e-324)  # a zero of another sign is other bits, too
    return largest


def compare(case: Case, folder: Path) -> tuple[int, float, float]:
    """Tensors, and the largest difference in bfloat16 to verl's merger and in float32 to the model's weights."""
    import torch

    from posttrain import merge_ckpt

    actor = str(folder / "actor")
    rounded = stored(merge_ckpt.run(actor, str(folder / "bfloat16"), dtype="bfloat16"))
    exact = stored(merge_ckpt.run(actor, str(folder / "float32"), dtype="float32"))
    weights = torch.load(folder / "weights.pt", weights_only=True)
    return len(rounded), difference(rounded, stored(folder / "theirs")), difference(exact, weights)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare merge-ckpt with verl's merger.")
    parser.add_argument("--there", nargs=4, help=argparse.SUPPRESS)  # how the script calls itself
    if given := parser.parse_args().there:
        work, root, text, rank = given
        cases = [Case(**case) for case in json.loads(text)]
        if work == "write":
            write(Path(root), cases, int(rank), cases[0].ranks)
        else:
            merge_theirs(Path(root), cases)
        return 0
    wrong = 0
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        for ranks in sorted({case.ranks for case in CASES}):
            text = json.dumps([asdict(case) for case in CASES if case.ranks == ranks])
            finish([there("--there", "write", root, text, rank) for rank in range(ranks)])
        finish([there("--there", "merge", root, json.dumps([asdict(case) for case in CASES]), 0)])
        print("| checkpoint of verl | tensors | to verl's merger, bfloat16 | to the weights, float32 |")
        print("| --- | --- | --- | --- |")
        for case in CASES:
            tensors, rounded, exact = compare(case, case.folder(root))
            print(f"| {case.name} | {tensors} | {rounded:.3g} | {exact:.3g} |", flush=True)
            wrong += rounded > 0 or exact > 0
    print(f"\n{len(CASES)} checkpoints, {wrong} of them merged to other weights")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
