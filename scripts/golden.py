"""Golden runs: record what short CPU runs compute at fixed seeds, and compare two records to the bit.

    python scripts/golden.py record before.json                 all runs, about four minutes on two cores
    python scripts/golden.py record before.json sft generate    these runs and those they need, merged into the file
    python scripts/golden.py compare before.json after.json     exit code 1, and a line for each difference

A record made before a restructuring and one made after it show that metrics, rollouts, responses, weights and optimizer
states are the same. The script calls the command line and reads the files that it leaves; it imports nothing of
posttrain. Whatever depends on the machine is left out by one rule (`MACHINE`), and its names are recorded, so that a
metric that disappears is noticed.

Floating-point sums depend on the shapes of a batch and on the number of threads, and an engine that samples without
seeds for each request depends on the order of its requests. So every process has one thread, and every engine runs one
request at a time (`rollout.max_concurrent=1`), in the order in which the driver sends them. With the default of 256,
two `rl` runs of one commit differ. Compare records of one machine and one environment only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

ROOT = Path(__file__).resolve().parent.parent

RENAMES: dict[str, str] = {"traces": "rollouts", "sync/canary_gap": "sync/check_gap"}
"""Names that have changed on purpose since BEFORE was recorded: a metric, a column, a file or a folder, old to new. A
folder's entry renames what lies in it, too."""

MACHINE = re.compile(r"^time$|^timing_s/|seconds|throughput|per_second|memory_gib|mfu|data_wait|^wait/")
"""Metrics and columns whose value depends on the machine or on the clock."""

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": str(ROOT),
    "TOKENIZERS_PARALLELISM": "false",
}
DEADLINE_S = 300.0
"""Longest duration of one command."""

SEP = " | "
"""Between the parts of a record's key."""

Record = dict[str, str]
"""What one run computed: a name of several parts to an exact value or a digest."""


# ---------------------------------------------------------------------- the runs


@dataclass(frozen=True)
class Golden:
    """Commands that are run one after the other, and the earlier runs whose files they read."""

    commands: tuple[tuple[str, ...], ...]
    needs: tuple[str, ...] = ()


def training(command: str, name: str, steps: int, *words: str, workers: int = 1) -> tuple[str, ...]:
    """Return the words of a training command on the CPU."""
    common = ("--name", name, "--steps", str(steps), "--workers", str(workers), "--set", "cluster.device=cpu")
    return (command, *common, "--console", "quiet", *words)


def sets(*values: str) -> tuple[str, ...]:
    """Return ``--set`` for each KEY=VALUE."""
    return tuple(word for value in values for word in ("--set", value))


ONE_REQUEST = sets("rollout.max_concurrent=1")
SFT = ("--preset", "tiny-arith-sft")
RL = ("--preset", "tiny-arith", "--model", "run:sft", *sets("data.batch_size=4", "rollout.n=4"), *ONE_REQUEST)
VALIDATION = sets("data.val=data/arith/test.parquet", "val.limit=4", "train.val_every=2")
PPO = sets("algo.kl_coef=0.05", "algo.kl_in=reward", "critic.optim.lr=1e-3", "algo.updates_per_step=2")
PREFER = ("--preset", "tiny-prefer", "--model", "run:sft", *sets("train.val_every=2"))
DAPO = sets("algo.updates_per_step=2", "rollout.filter_groups=true", "rollout.filter_max_batches=3")
GENERATE = ("--preset", "tiny-arith-generate", "--model", "run:sft", "--limit", "8", "--n", "2")

RUNS: dict[str, Golden] = {
    "prep": Golden(
        (
            ("prep", "arith", "--train-rows", "200", "--test-rows", "20"),
            ("prep", "arith-preferences", "--train-rows", "60", "--test-rows", "8"),
        )
    ),
    # Long enough that the model calls its tool and solves a few problems: rewards then differ within groups.
    "sft": Golden((training("sft", "sft", 150, *SFT, *sets("train.optim.lr=5e-3")),), ("prep",)),
    "prefer": Golden((training("prefer", "prefer", 4, *PREFER),), ("sft",)),
    "rl": Golden((training("rl", "rl", 3, *RL, *VALIDATION, *sets("algo.kl_coef=0.01")),), ("sft",)),
    "dapo": Golden((training("rl", "dapo", 2, *RL, "--algo", "dapo", *DAPO),), ("sft",)),
    "ppo": Golden((training("rl", "ppo", 3, *RL, "--algo", "ppo", *PPO),), ("sft",)),
    "generate": Golden((("generate", "--name", "generate", "--console", "quiet", *GENERATE, *ONE_REQUEST),), ("sft",)),
    "eval": Golden((("eval", "runs/generate/responses.parquet", "--pass-at", "1,2", "--json"),), ("generate",)),
    "resume-2-to-1": Golden(
        (
            training("sft", "resume-2-to-1", 2, *SFT, workers=2),
            training("sft", "resume-2-to-1", 4, *SFT, "--resume", "runs/resume-2-to-1", workers=1),
        ),
        ("prep",),
    ),
    "resume-1-to-2": Golden(
        (
            training("rl", "resume-1-to-2", 1, *RL, workers=1),
            training("rl", "resume-1-to-2", 3, *RL, "--resume", "runs/resume-1-to-2", workers=2),
        ),
        ("sft",),
    ),
    "merge": Golden((("merge-ckpt", "rl", "--out", "runs/merge"),), ("rl",)),
}


def chosen(names: Sequence[str]) -> list[str]:
    """Return ``names`` and the runs that they need, in the order of ``RUNS``; all runs for no names."""
    wanted = set(names or RUNS)
    for name in reversed(RUNS):
        if name in wanted:
            wanted.update(RUNS[name].needs)
    return [name for name in RUNS if name in wanted]


def record(names: Sequence[str]) -> dict[str, Record]:
    """Run ``names`` in a temporary folder and return a record of each. Exits with 1 where a command fails."""
    records: dict[str, Record] = {}
    with tempfile.TemporaryDirectory(prefix="golden-") as text:
        folder = Path(text)
        for name in chosen(names):
            print(f"== {name}", file=sys.stderr, flush=True)
            answers = [_posttrain(folder, words) for words in RUNS[name].commands]
            produced = folder / ("data" if name == "prep" else f"runs/{name}")
            records[name] = dict(read_folder(produced)) if produced.exists() else {}
            if name == "eval":
                records[name] |= flat(json.loads(answers[-1]), "report")
            if not records[name]:
                sys.exit(f"{name} left nothing to record in {produced.relative_to(folder)}")
    return records


def _posttrain(folder: Path, words: Sequence[str]) -> str:
    """Return the stdout of a posttrain command that runs in ``folder``."""
    command = [sys.executable, "-m", "posttrain", *words]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=DEADLINE_S
    )
    if done.returncode != 0:
        sys.exit(f"exit code {done.returncode}: posttrain {' '.join(words)}\n{done.stderr[-4000:]}")
    return done.stdout


# ---------------------------------------------------------------------- reading what a run left


def read_folder(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield keys and values of all metrics, tables and tensors below ``folder``, wherever they lie."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(file.relative_to(folder))
        if file.name == "metrics.jsonl":
            yield from _metrics(file)
        elif file.suffix in (".parquet", ".arrow"):
            yield from _table(_read_table(file), name)
        elif file.name == ".metadata":
            yield from _tensors(_read_shards(file.parent), str(file.parent.relative_to(folder)))
        elif file.suffix == ".safetensors":
            yield from _tensors(_read_safetensors(file), name)
        elif file.name in ("loader.json", "probe.json"):
            yield from flat(json.loads(file.read_text()), name).items()
        elif "huggingface" in file.parts or file.with_name("model.safetensors").exists():
            yield name, hashlib.sha256(file.read_bytes()).hexdigest()


def _metrics(file: Path) -> Iterator[tuple[str, str]]:
    """Yield every metric of every step that does not depend on the machine, and the names of the others."""
    for line in file.read_text().splitlines():
        row = json.loads(line)
        for name, value in row.items():
            if MACHINE.search(name):
                yield SEP.join(("left out", f"step {row['step']}", name)), ""
            else:
                yield SEP.join(("metrics", f"step {row['step']}", name)), exact(value)


def _read_table(file: Path) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if file.suffix == ".parquet":
        return pq.read_table(file)
    with pa.ipc.open_file(file) as reader:
        return reader.read_all()


def _table(table: pa.Table, name: str) -> Iterator[tuple[str, str]]:
    """Yield a digest of each column."""
    yield SEP.join((name, "rows")), str(table.num_rows)
    for column in table.column_names:
        if MACHINE.search(column):
            yield SEP.join((name, "left out", column)), ""
        else:
            text = json.dumps([str(table.schema.field(column).type), table[column].to_pylist()], default=str)
            yield SEP.join((name, column)), hashlib.sha256(text.encode()).hexdigest()


def _read_shards(folder: Path) -> dict[str, Any]:
    """Return the whole content of a folder of torch.distributed.checkpoint, whatever world size wrote it."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    content: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in entries.items()
    }
    load(content, checkpoint_id=folder, no_dist=True)
    return content


def _read_safetensors(file: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(file))


def _tensors(content: Mapping[str, Any], name: str) -> Iterator[tuple[str, str]]:
    """Yield shape, dtype and digest of each tensor, and other values as they are."""
    import torch

    for key, value in sorted(content.items()):
        if isinstance(value, torch.Tensor):
            data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            text = f"{tuple(value.shape)} {value.dtype} {hashlib.sha256(data).hexdigest()}"
        else:
            text = exact(value)
        yield SEP.join((name, key)), text


def exact(value: Any) -> str:
    """Return ``value`` as text that differs whenever a bit of it differs: floats in hexadecimal."""
    return value.hex() if isinstance(value, float) else repr(value)


def flat(value: Any, *names: str) -> Record:
    """Return the leaves of nested dicts and lists under keys of their places."""
    if isinstance(value, Mapping | list) and value:
        items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else enumerate(value)
        return {key: leaf for name, inner in items for key, leaf in flat(inner, *names, str(name)).items()}
    return {SEP.join(names): exact(value)}


# ---------------------------------------------------------------------- comparing


def renamed(key: str, renames: Mapping[str, str]) -> str:
    """Return ``key`` with each part that is an old name, or lies in a folder of an old name, under the new one."""

    def new(part: str) -> str:
        for old, name in renames.items():
            if part == old or part.startswith(f"{old}/"):
                return name + part[len(old) :]
        return part

    return SEP.join(new(part) for part in key.split(SEP))


def differences(
    before: Mapping[str, Record], after: Mapping[str, Record], renames: Mapping[str, str] = RENAMES
) -> list[str]:
    """Return a line for each run, name or value that is in one record only or differs; none if they are equal."""
    lines = [f"{name}: only in BEFORE" for name in before if name not in after]
    lines += [f"{name}: only in AFTER" for name in after if name not in before]
    for name in before.keys() & after.keys():
        old = {renamed(key, renames): value for key, value in before[name].items()}
        new = after[name]
        lines += [f"{name}: {key}: only in BEFORE" for key in old.keys() - new.keys()]
        lines += [f"{name}: {key}: only in AFTER" for key in new.keys() - old.keys()]
        lines += [f"{name}: {key}: {old[key]} != {new[key]}" for key in old.keys() & new.keys() if old[key] != new[key]]
    return sorted(lines)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run and record")
    recording.add_argument("file", type=Path)
    recording.add_argument("runs", nargs="*", metavar="RUN", help=f"default: all of {', '.join(RUNS)}")
    comparing = commands.add_parser("compare", help="compare two records")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args(args)
    if given.command == "record":
        if unknown := [name for name in given.runs if name not in RUNS]:
            parser.error(f"unknown run {unknown[0]!r}; there are {', '.join(RUNS)}")
        known = json.loads(given.file.read_text()) if given.file.exists() and given.runs else {}
        given.file.write_text(json.dumps(known | record(given.runs), indent=1, sort_keys=True))
        return 0
    before, after = (json.loads(file.read_text()) for file in (given.before, given.after))
    lines = differences(before, after)
    for line in lines:
        print(line)
    print(f"{sum(map(len, before.values()))} values of {len(before)} runs, {len(lines)} differences", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
