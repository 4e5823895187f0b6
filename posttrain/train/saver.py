"""What a training worker does for a checkpoint: its shards to disk while training goes on, and back.

``ShardSaver.start`` copies to host memory, which is all that training waits for; a thread writes. Ranks agree on who
writes what over a gloo group of their own, so that collectives of training may run meanwhile.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from posttrain.core.errors import PosttrainError, RunError, explained
from posttrain.models import lora
from posttrain.train.checkpoint import Digest
from posttrain.train.hostmem import pieces
from posttrain.train.optim import dequantized, init_state, is_quantized, local, quantize

if TYPE_CHECKING:
    from posttrain.config.train import OptimConfig

_FILES = 4
"""Files of one rank, written at the same time: one thread does not fill a fast disk."""

_SYNCED = 256 << 20
"""Bytes after which a file is brought to the disk: left to itself the system begins late, and stops others then."""

State = dict[str, Any]


class ShardSaver:
    """Saves of one worker, one after the other.

    Args:
        deadline_s: longest wait of a rank for the others, when all have written their part.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline = timedelta(seconds=deadline_s)
        self._copies = HostCopies()
        self._group: dist.ProcessGroup | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._writing: Future[dict[str, Digest]] | None = None
        self._preparing: Future[None] | None = None

    def prepare(self, states: Mapping[str, State]) -> None:
        """Begin to make host memory for copies of tensors like these, which takes longer than the copy."""
        self._preparing = self._thread.submit(self._copies.prepare, states)

    def start(self, folder: Path, states: Mapping[str, State], *, background: bool) -> None:
        """Write each of ``states`` into the folder of its name in ``folder``. A collective.

        Args:
            background: return when they are copied, and write meanwhile; ``finish`` tells the end.

        Raises:
            RunError: they could not be written.
        """
        if dist.is_initialized() and self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self._deadline)
        for before in (self._preparing, self._writing):
            if before is not None:
                before.exception()  # waits: its memory is used again
        if background:
            states = self._copies.take(states)
        self._writing = self._thread.submit(_write, folder, states, self._group)
        if not background:
            self._writing.result()

    def finish(self) -> dict[str, Digest] | None:
        """The files that this rank has written, by name relative to the folder; None while it is still at it.

        Raises:
            RunError: they could not be written, here or by another rank.
        """
        if self._writing is None or not self._writing.done():
            return None
        return self._writing.result()


class HostCopies:
    """Copies of tensors in host memory, where the next step does not change them. The memory is kept for the next time,
    pinned for tensors of a GPU: the first copy is slower.

    (torch's ``DefaultStager`` does as much; in torch 2.11 it works once.)
    """

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def prepare(self, states: Mapping[str, State]) -> None:
        """Make memory for copies of these, if there is none yet."""
        tensors = list(_tensors(states))
        if [_kind(tensor) for tensor in tensors] != [_kind(copy) for copy in self._kept]:
            self._kept = _buffers(tensors)

    def take(self, states: Mapping[str, State]) -> Mapping[str, State]:
        """The same nested dicts with copies, sharded as the tensors are."""
        self.prepare(states)
        tensors = [tensor.detach() for tensor in _tensors(states)]
        for copy, tensor in zip(self._kept, tensors, strict=True):
            local(copy).copy_(local(tensor), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        copies = iter(self._kept)
        copied = _mapped(states, lambda _: next(copies))
        assert isinstance(copied, dict)
        return copied


@torch.no_grad()
def _buffers(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors in host memory like these."""
    sizes = [local(tensor).numel() * tensor.element_size() for tensor in tensors]
    buffers = []
    memory = pieces(sizes, pinned=any(local(tensor).is_cuda for tensor in tensors))
    for tensor, place in zip(tensors, memory, strict=True):
        copy = torch.empty_like(tensor, device="cpu")  # of a sharded one this rank's part
        part = local(copy)
        part.set_(place.untyped_storage(), place.storage_offset() // tensor.element_size(), part.shape, part.stride())
        buffers.append(copy)
    return buffers


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.Size, torch.dtype]:
    return tensor.shape, local(tensor).shape, tensor.dtype


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """All in nested dicts."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, torch.Tensor):
        yield tree


def _mapped(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nested dicts with each tensor changed."""
    if isinstance(tree, Mapping):
        return {key: _mapped(value, change) for key, value in tree.items()}
    return change(tree) if isinstance(tree, torch.Tensor) else tree


def shards_of(model: nn.Module, optimizer: torch.optim.Optimizer | None, step: int) -> dict[str, State]:
    """What is saved: ``model`` holds the weights, of a LoRA run its adapter; ``optim`` the optimizer's state and its
    step."""
    states: dict[str, State] = {"model": _kept(model)}
    if optimizer is not None:
        states["optim"] = {"state": _plain(_optimizer_state(model, optimizer)), "step": step}
    return states


def trained_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """What a checkpoint would hold of this rank, without copies: of quantized state the scales."""
    trained = _kept(model)
    found: dict[str, torch.Tensor] = dict(trained)
    state: Mapping[Any, Any] = {} if optimizer is None else optimizer.state
    for name, parameter in trained.items():
        for key, tensor in state.get(parameter, {}).items():
            part: Any = local(tensor)
            found[f"{name} ({key})"] = part.scale if is_quantized(tensor) else tensor
    return found


def load_shards(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Read what was saved, at any world size. Returns the optimizer step. A collective."""
    load(_kept(model), checkpoint_id=folder / "model")
    if optimizer is None:
        return 0
    state = _optimizer_state(model, optimizer)
    read: dict[str, Any] = {"state": _plain(state), "step": 0}
    load(read, checkpoint_id=folder / "optim")  # writes into the optimizer's own tensors, where they are plain
    for name, tensors in state.items():
        for key, tensor in tensors.items():
            if is_quantized(tensor):
                quantize(tensor, read["state"][name][key])
    return int(read["step"])


def _kept(model: nn.Module) -> State:
    """All parameters, or those of the adapter in a LoRA run. What is frozen, such as a vision tower, is among them: a
    checkpoint is a whole model. A tied weight is listed once; buffers follow from the config."""
    parameters = dict(model.named_parameters())
    adapter = {name: parameter for name, parameter in parameters.items() if lora.base_name(name) is None}
    return adapter or parameters


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """The optimizer's own tensors by parameter name, sharded as the parameters are."""
    init_state(optimizer)
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p.requires_grad}


def _plain(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    """The same with copies of quantized tensors in float32."""
    return {
        name: {key: dequantized(t) if is_quantized(t) else t for key, t in tensors.items()}
        for name, tensors in state.items()
    }


# ---------------------------------------------------------------------- files


class _Files(FileSystem):
    """Plain files whose digests are known when they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: dict[Path, Digest] = {}
        self.error: Exception | None = None
        """The error of the first file that could not be written."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        with super().create_stream(path, mode) as file:
            if mode != "wb":
                yield file
                return
            stream = _Stream(file)
            try:
                yield stream
            except Exception as error:
                self.error = self.error or stream.error or error
                raise
            self.digests[Path(path)] = {"bytes": stream.size, "sha256": stream.hash.hexdigest()}


class _Stream:
    """A file that is hashed while it is written from its beginning to its end, and that goes to the disk meanwhile."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.size = self._on_disk = 0
        self.hash = hashlib.sha256()
        self.error: OSError | None = None
        """The system's reason; torch's own error, which follows it, does not always name it."""

    def write(self, data: Any) -> int:
        try:
            written = int(self._file.write(data))
        except OSError as error:
            self.error = error
            raise
        self.hash.update(data)
        self.size += written
        if self.size - self._on_disk >= _SYNCED:
            self._file.flush()
            os.fdatasync(self._file.fileno())
            self._on_disk = self.size
        return written

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return int(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class _Writer(FileSystemWriter):
    """torch's writer, which says what went wrong: its threads keep that to themselves, and a full disk would go
    unnoticed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, thread_count=_FILES)
        self.fs: _Files = _Files()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            done = super().write_data(plan, planner)
        except Exception as error:
            raise self.fs.error or error from error
        missing = len(plan.items) - len(done.value())
        if missing:
            what = f"{missing} of {len(plan.items)} tensors"
            raise self.fs.error or RunError(f"{what} could not be written to {self.path}")
        return done


def _write(folder: Path, states: Mapping[str, State], group: dist.ProcessGroup | None) -> dict[str, Digest]:
    digests: dict[str, Digest] = {}
    try:
        for name, state in states.items():
            writer = _Writer(folder / name)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                save(state, storage_writer=writer, process_group=group)
            # Not of what is renamed afterwards.
            shards = ((file, found) for file, found in writer.fs.digests.items() if file.suffix == ".distcp")
            digests |= {str(file.relative_to(folder)): found for file, found in shards}
    except CheckpointException as error:
        (first, _), *_ = error.failures.values()
        raise not_written(folder, first) from error
    return digests


def not_written(folder: Path, error: BaseException) -> PosttrainError:
    """Return what a person is told when files of a checkpoint could not be written."""
    if isinstance(error, PosttrainError):
        return error
    return explained(error, folder) or RunError(f"cannot write {folder}: {type(error).__name__}: {error}")


# ---------------------------------------------------------------------- random numbers


def save_random_state(folder: Path, rank: int, world_size: int) -> None:
    """Write this worker's generators' state: what a model's own code draws goes on as it would have."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    folder.mkdir(parents=True, exist_ok=True)
    file = _random_file(folder, rank, world_size)
    with file.open("wb") as opened:
        torch.save(state, opened)
        opened.flush()
        os.fsync(opened.fileno())


def load_random_state(folder: Path, rank: int, world_size: int) -> None:
    """Read it. A run that goes on with another number of workers has none for them: they keep the seed they began
    with."""
    file = _random_file(folder, rank, world_size)
    if not file.is_file():
        return
    state = torch.load(file, weights_only=True)
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _random_file(folder: Path, rank: int, world_size: int) -> Path:
    return folder / f"rank_{rank}_of_{world_size}.pt"


def checkpoint_bytes(parameters: Iterable[Tensor], optim: OptimConfig, *, adapted: bool) -> int:
    """Return about what a checkpoint of these parameters takes on disk: weights and two moments, of all ranks. In a
    LoRA run (``adapted``) what is frozen is not in it."""
    moment = 4 if optim.name == "adamw_8bit" else None  # written as float32
    size = 0
    for parameter in parameters:
        if parameter.requires_grad:
            size += parameter.numel() * (parameter.element_size() + 2 * (moment or parameter.element_size()))
        elif not adapted:
            size += parameter.numel() * parameter.element_size()
    return size
