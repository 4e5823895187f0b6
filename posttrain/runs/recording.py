"""What a run writes into its folder besides its results: its log, its metrics, how it ended, and its report."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from posttrain import __version__
from posttrain.config import Config
from posttrain.core.errors import Interrupted, PosttrainError, presented
from posttrain.core.text import printable
from posttrain.runs.run import RunDir, Status
from posttrain.tracking.log import RunLog
from posttrain.tracking.report.background import Reporter
from posttrain.tracking.rules import rules_of
from posttrain.tracking.tracker import Tracker
from posttrain.train import checkpoint

_REPORT_S: dict[Status, float] = {"finished": 60.0, "failed": 20.0, "interrupted": 1.0}
"""Longest wait for the report, by how the run ended: somebody who pressed Ctrl-C does not wait for it."""


def open_tracker(cfg: Config, folder: RunDir, total_steps: int) -> Tracker:
    """Return the tracker of a run. Raises ``ConfigError`` where one of `run.logger` does not start."""
    title = f"{cfg.command} {cfg.run.name}"
    config, rules = cfg.model_dump(mode="json"), rules_of(cfg)
    tracker = Tracker(folder.path, title, total_steps, cfg.run.logger, config, cfg.run.console, rules)
    for note in folder.notes:
        tracker.note(note)
    return tracker


@contextmanager
def recorded(cfg: Config, folder: RunDir) -> Iterator[Reporter | None]:
    """Record in the run's folder how the run ended, and why if it failed; keep its report where `run.report` asks for
    one. Unfinished checkpoints are removed at the end."""

    def say(text: str) -> None:  # the view has been taken down, or is about to be
        print(json.dumps({"note": text}) if cfg.run.console == "json" else printable(text), file=sys.stderr)

    console = "console" in cfg.run.logger and cfg.run.console != "quiet"
    reporter = Reporter(folder.path, say) if cfg.run.report else None
    log = RunLog(folder.logs)
    log.write(f"posttrain {__version__} {cfg.command} {cfg.run.name}, process {os.getpid()}")
    status: Status = "failed"
    failure: PosttrainError | None = None
    try:
        try:
            yield reporter
        finally:  # first: it may free the disk space that the reason needs
            checkpoint.remove_unfinished(folder.checkpoints)
        status = "finished"
    except (KeyboardInterrupt, Interrupted) as stopped:
        status = "interrupted"
        log.write(str(stopped) or "interrupted")
        raise
    except BaseException as error:
        failure = presented(error)
        log.write("".join(traceback.format_exception(error)) + f"error: {failure}")
        raise
    finally:
        try:
            folder.finish(status, failure)
        except PosttrainError as error:  # of two failures the first is the one to hear of
            if failure is None:
                raise
            say(f"warning: {folder.path} does not say why the run failed: {error.message}")
        if reporter is not None and reporter.finish(_REPORT_S[status]) and console and status == "finished":
            say(f"report: {reporter.file}")
