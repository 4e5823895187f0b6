"""A check, and how checks are run: each in a process of its own with a deadline, so that none can hold up another."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Literal

import psutil

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class CheckResult:
    """One line of the report."""

    name: str
    status: Status
    detail: str
    hint: str = ""
    """What to do about it."""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class Check:
    """A question about this machine."""

    name: str
    ask: Callable[[], list[CheckResult]]
    """Called in a process forked for it."""
    deadline_s: float
    late: str
    """What to do when it does not answer."""


def run_checks(checks: list[Check]) -> Iterator[list[CheckResult]]:
    """The findings of each check, in the order of ``checks``; all run at the same time."""
    running = [_Running(check) for check in checks]
    try:
        for one in running:
            yield one.findings()
    finally:
        for one in running:
            one.end()


class _Running:
    def __init__(self, check: Check) -> None:
        self.check = check
        # A fork starts at once and has imported nothing that has threads.
        context = multiprocessing.get_context("fork")
        self.answers, sending = context.Pipe(duplex=False)
        self.process: BaseProcess = context.Process(target=_answer, args=(check, sending), daemon=False)
        self.until = time.monotonic() + check.deadline_s
        self.process.start()
        sending.close()

    def findings(self) -> list[CheckResult]:
        name = self.check.name
        try:
            if self.answers.poll(max(0.0, self.until - time.monotonic())):
                found: list[CheckResult] = self.answers.recv()
                return found
        except EOFError:
            self.process.join(1.0)
            code = self.process.exitcode
            return [CheckResult(name, "fail", f"the check died (exit code {code})", self.check.late)]
        return [CheckResult(name, "fail", f"no answer within {self.check.deadline_s:g} s", self.check.late)]

    def end(self) -> None:
        """Kill the process and what it started. One that the kernel does not let die is left behind."""
        self.answers.close()
        try:
            family = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
        except psutil.NoSuchProcess:
            family = []
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.join(1.0)


def _answer(check: Check, sending: Connection) -> None:
    try:
        findings = check.ask()
    except Exception as error:  # whatever it is, it is this check's finding
        findings = [CheckResult(check.name, "fail", f"{type(error).__name__}: {error}", check.late)]
    sending.send(findings)
    sending.close()


def worst(findings: list[CheckResult]) -> Status:
    order: Mapping[Status, int] = {"ok": 0, "warn": 1, "fail": 2}
    return max((finding.status for finding in findings), key=lambda status: order[status], default="ok")
