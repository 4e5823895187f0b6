"""Metrics for TensorBoard and Weights & Biases. Both packages are optional (extras `tensorboard` and `wandb`)."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import ConfigError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_UPLOAD_S = 60.0
"""Longest wait for the last upload to W&B. What is left then is on disk, for `wandb sync`."""


class TensorBoard:
    """Event files in ``tensorboard/`` of the run's folder."""

    def __init__(self, run_path: Path) -> None:
        self._folder = run_path / "tensorboard"
        self._writer: SummaryWriter | None = None
        self._purge_step: int | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def rewind(self, step: int) -> None:
        """Old event files stay as they are: the next one says from which step on they no longer count."""
        self.close()
        self._purge_step = step + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightsAndBiases:
    """A W&B run, set up by wandb's own variables (``WANDB_MODE``, ``WANDB_PROJECT``, ``WANDB_ENTITY``, ...).

    ``wandb.json`` in the run's folder holds its id and the last step logged, so that a resumed run goes on in it. A run
    of W&B only moves forward: steps that are trained again are not logged again.

    Raises:
        ConfigError: wandb does not start, for example without a login.
    """

    def __init__(self, run_path: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self._file = run_path / "wandb.json"
        self._state: dict[str, Any] = {"id": uuid.uuid4().hex[:12], "step": 0}
        if self._file.is_file():
            self._state = dict(json.loads(self._file.read_text()))
        try:
            self._run: wandb.Run | None = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "posttrain"),
                name=os.environ.get("WANDB_NAME", run_path.name),
                id=self._state["id"],
                resume="allow",
                dir=run_path,
                config=dict(config),
                settings=wandb.Settings(console="off", silent=True, finish_timeout=_UPLOAD_S),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"W&B did not start: {error}",
                hint="run `wandb login`, or set WANDB_MODE=offline, or leave wandb out of run.logger",
            ) from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self._run is not None
        if step <= self._state["step"]:
            return
        self._run.log(dict(metrics), step=step)
        self._state["step"] = step
        temporary = self._file.with_name(f".{self._file.name}.tmp")
        temporary.write_text(json.dumps(self._state))
        os.replace(temporary, self._file)

    def rewind(self, step: int) -> None:
        """Nothing: ``write`` knows what was logged."""

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
