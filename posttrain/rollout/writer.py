"""Writes the trajectories of a run while it goes on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from posttrain.core.errors import DeadlineError, PosttrainError, RunError
from posttrain.core.types import Trajectory
from posttrain.rollout.advantage_files import advantages_file, write_advantages
from posttrain.rollout.files import Kind, write_rollouts

_PREFIX: dict[Kind, str] = {"train": "step", "val": "val"}
_HINT = "free some space there, or write less with run.rollouts_every; then run the same command again"


class RolloutWriter:
    """One file a step, written by a thread, one file at a time. An async context manager: leaving it waits for the
    last file.

    Args:
        folder: gets ``step_000012.parquet``, ``step_000012.advantages.arrow`` and, for validation,
            ``val_000012.parquet``.
        every: steps between files; 0: none is written.
        tokenizer: ``fingerprint`` of the run's tokenizer.
        deadline_s: longest wait for one file.
    """

    def __init__(self, folder: Path, every: int, tokenizer: str, deadline_s: float) -> None:
        self.folder = folder
        self.every = every
        self.tokenizer = tokenizer
        self.deadline_s = deadline_s
        self._writing: tuple[Path, asyncio.Future[None]] | None = None

    def path(self, step: int, kind: Kind = "train") -> Path:
        """Return the file of a step."""
        return self.folder / f"{_PREFIX[kind]}_{step:06}.parquet"

    async def write(
        self, step: int, groups: Sequence[Sequence[Trajectory]], *, temperature: float, kind: Kind = "train"
    ) -> None:
        """Begin to write a step's trajectories, which must not change any more. Waits for the file before first.

        Raises:
            RunError: the file before could not be written.
        """
        if not self._wanted(step, groups):
            return
        await self.flush()
        path = self.path(step, kind)
        work = asyncio.to_thread(
            write_rollouts, path, groups, kind=kind, step=step, temperature=temperature, tokenizer=self.tokenizer
        )
        self._begin(path, work)

    async def write_advantages(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> None:
        """Begin to write what a step's trajectories were trained with, beside their file, which it waits for.

        Raises:
            RunError: that file could not be written.
        """
        if not self._wanted(step, groups):
            return
        await self.flush()
        path = advantages_file(self.path(step))
        self._begin(path, asyncio.to_thread(write_advantages, path, groups))

    def _wanted(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> bool:
        return bool(self.every) and step % self.every == 0 and any(groups)

    def _begin(self, path: Path, work: Coroutine[Any, Any, None]) -> None:
        self._writing = (path, asyncio.ensure_future(work))

    async def flush(self) -> None:
        """Wait for what is being written.

        Raises:
            RunError: it could not be written, or not in time.
        """
        if self._writing is None:
            return
        (path, writing), self._writing = self._writing, None
        try:
            await asyncio.wait_for(writing, self.deadline_s)
        except TimeoutError:
            raise DeadlineError(f"{path} was not written within {self.deadline_s:g} s", hint=_HINT) from None
        except PosttrainError as error:
            raise RunError(error.message, hint=f"{error.hint}; run.rollouts_every writes less") from error

    def last_step(self) -> int:
        """Return how many steps have been written without a gap."""
        step = 0
        while self.path(step + 1).is_file():
            step += 1
        return step

    def drop_after(self, step: int) -> None:
        """Delete the files of later steps: a resumed run writes them again."""
        for file in self.folder.glob("*.*"):
            found = re.fullmatch(r"(?:step|val)_(\d+)\.(?:parquet|advantages\.arrow)", file.name)
            if found and int(found[1]) > step:
                file.unlink()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        try:
            await self.flush()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"besides: {failure}")
