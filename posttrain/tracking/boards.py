"""Metrics for TensorBoard, Weights & Biases and MLflow. Their packages are optional (extras `tensorboard`, `wandb` and
`mlflow`) and imported only where one is used."""

from __future__ import annotations

import json
import os
import queue
import re
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from posttrain.core.errors import ConfigError, PosttrainError, first_line
from posttrain.core.files import write_text
from posttrain.core.text import printable

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient
    from torch.utils.tensorboard import SummaryWriter

_UPLOAD_S = 60.0
"""Longest wait for the last upload. What is left of W&B's then is on disk, for `wandb sync`."""
_PARAMS = 100
"""Most parameters that MLflow takes at once."""
_NAME = 250
"""Most characters of a name that MLflow takes."""


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

    def close(self, *, failed: bool = False) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightsAndBiases:
    """A W&B run, set up by wandb's own variables (``WANDB_MODE``, ``WANDB_PROJECT``, ``WANDB_ENTITY``, ...).

    ``wandb.json`` in the run's folder holds its id and the last step logged, so that a resumed run goes on in it. A run
    of W&B only moves forward: steps that are trained again are not logged again.

    Raises:
        ConfigError: wandb does not start, for example without a login, or with a variable that it cannot read.
    """

    def __init__(self, run_path: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self._file = run_path / "wandb.json"
        self._state: dict[str, Any] = {"id": uuid.uuid4().hex[:12], "step": -1}
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
        except (wandb.Error, ValidationError) as error:  # the second: of a variable, by its name among wandb's settings
            wrong = error.errors() if isinstance(error, ValidationError) else []
            said = ", ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in wrong) or str(error)
            raise ConfigError(
                f"W&B did not start: {said}",
                hint="run `wandb login`, or set WANDB_MODE=offline, or leave wandb out of run.logger",
            ) from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self._run is not None
        if step <= self._state["step"]:
            return
        # Given a step, wandb waits for more of it unless told that this is all: a killed run would lose its last one.
        self._run.log(dict(metrics), step=step, commit=True)
        self._state["step"] = step
        write_text(self._file, json.dumps(self._state))

    def rewind(self, step: int) -> None:
        """Nothing: ``write`` knows what was logged."""

    def close(self, *, failed: bool = False) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(failed))
            self._run = None


class MLflow:
    """A run of MLflow, in ``mlflow.db`` of the run's folder (SQLite), or where ``MLFLOW_TRACKING_URI`` says; its
    experiment is ``MLFLOW_EXPERIMENT_NAME``, or `posttrain`.

    ``mlflow.json`` in the run's folder holds its id and the last step logged, so that a resumed run goes on in it.
    Steps that are trained again are not logged again. A thread sends what is written: a server that is slow or gone
    costs a warning and some points of its curves, and never the run.

    Raises:
        ConfigError: it cannot be reached.
    """

    def __init__(self, run_path: Path, config: Mapping[str, Any]) -> None:
        # A server that is gone is given up after seconds: MLflow's own limits are minutes for each step.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow.tracking import MlflowClient

        self._file = run_path / "mlflow.json"
        where = os.environ.get("MLFLOW_TRACKING_URI") or _sqlite_uri((run_path / "mlflow.db").resolve())
        try:
            self._client = MlflowClient(tracking_uri=where)
            if self._file.is_file():
                self._state: dict[str, Any] = dict(json.loads(self._file.read_text()))
                self._client.update_run(self._state["id"], status="RUNNING")
            else:
                self._state = {"id": _new_mlflow_run(self._client, run_path, config), "step": -1}
                write_text(self._file, json.dumps(self._state))
        except PosttrainError:
            raise
        except Exception as error:  # of MLflow, its database, or a driver for that which is not installed
            raise ConfigError(
                f"MLflow at {where} did not start: {first_line(error)}",
                hint="set MLFLOW_TRACKING_URI, or leave mlflow out of run.logger",
            ) from error
        self._failed = False
        self._waiting: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="mlflow", daemon=True)
        self._sender.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self._state["step"]:
            self._state["step"] = step
            self._waiting.put((step, {name: float(value) for name, value in metrics.items()}))

    def rewind(self, step: int) -> None:
        """Nothing: ``write`` knows what was logged."""

    def close(self, *, failed: bool = False) -> None:
        self._failed = failed
        if self._sender.is_alive():
            self._waiting.put(None)
            self._sender.join(_UPLOAD_S)

    def _send(self) -> None:
        from mlflow.entities import Metric

        warned = False
        while True:
            item = self._waiting.get()
            try:
                if item is None:
                    self._client.set_terminated(self._state["id"], status="FAILED" if self._failed else "FINISHED")
                    return
                step, metrics = item
                now = round(time.time() * 1000)
                batch = [Metric(_mlflow_name(name), value, now, step) for name, value in metrics.items()]
                self._client.log_batch(self._state["id"], metrics=batch)
                write_text(self._file, json.dumps({"id": self._state["id"], "step": step}))
            except Exception as error:  # of MLflow, its database or the network
                if not warned:
                    text = printable(f"warning: MLflow: {first_line(error)}; all metrics are in metrics.jsonl")
                    print(text, file=sys.stderr, flush=True)
                warned = True
                if item is None:
                    return


def _new_mlflow_run(client: MlflowClient, run_path: Path, config: Mapping[str, Any]) -> str:
    """Start a run of MLflow with the config as its parameters, by dotted key, and return its id."""
    from mlflow.entities import Param

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "posttrain")
    found = client.get_experiment_by_name(name)
    experiment = client.create_experiment(name) if found is None else found.experiment_id
    run_id = str(client.create_run(experiment, run_name=run_path.name).info.run_id)
    params = [Param(_mlflow_name(key), str(value)[:6000]) for key, value in _leaves(config)]
    for i in range(0, len(params), _PARAMS):
        client.log_batch(run_id, params=params[i : i + _PARAMS])
    return run_id


def _sqlite_uri(file: Path) -> str:
    """Return the URI of a database. Escapes, after which MLflow makes an empty folder of the escaped name too, are only
    in that of a path that would be read as another one: with ``?``, or with what looks like an escape."""
    from sqlalchemy import URL, make_url

    plain = f"sqlite:///{file}"
    if make_url(plain).database == str(file):
        return plain
    return URL.create("sqlite", database=str(file)).render_as_string()


def _mlflow_name(name: str) -> str:
    """Return a name that MLflow takes, which has letters, digits and a few other characters, and reads as a path that
    cannot be written in a shorter way: `mean@4` is `mean_at_4` there, and `http://x` is `http:/x`."""
    taken = re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))
    parts = [part.replace(".", "_") if part in (".", "..") else part for part in taken.split("/") if part]
    return "/".join(parts)[:_NAME].rstrip("/")


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
