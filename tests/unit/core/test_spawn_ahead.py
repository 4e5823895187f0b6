"""Processes that begin ahead: they become what ``multiprocessing`` would have started, and nothing else does."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from posttrain.core import spawn_ahead as module
from posttrain.core.spawn_ahead import AheadProcess, end_unused, spawn_ahead

IMPORTED = "wave"
"""A module that nobody else imports."""
SPAWN = multiprocessing.get_context("spawn")
locks: list[Any] = []


def report(pipe: Connection, lock: Any) -> None:
    parent = multiprocessing.parent_process()
    with lock:
        pipe.send((os.getpid(), IMPORTED in sys.modules, os.environ.get("LATE"), parent and parent.pid))
    print("to the parent's output", flush=True)
    os._exit(7)


def with_a_child(pipe: Connection, lock: Any) -> None:
    child = SPAWN.Process(target=report, args=(pipe, lock))
    child.start()
    child.join()
    pipe.send((os.getpid(), child.pid, child.exitcode))


@pytest.fixture(autouse=True)
def _none_left() -> Iterator[None]:
    yield
    end_unused()


def start(target: Any = report) -> tuple[Any, Connection]:
    ours, theirs = SPAWN.Pipe(duplex=False)
    locks.append(SPAWN.Lock())  # its file goes with the last reference
    process = SPAWN.Process(target=target, args=(theirs, locks[-1]))
    process.start()
    theirs.close()
    return process, ours


def begin(**options: Any) -> psutil.Process:
    spawn_ahead([AheadProcess(__name__, (IMPORTED,), **options)])
    return psutil.Process(module._waiting[-1].pid)


def test_process_that_waited_is_what_a_new_one_would_be(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    waiting = begin()
    monkeypatch.setenv("LATE", "set after it began")
    process, pipe = start()
    assert pipe.recv() == (waiting.pid, True, "set after it began", os.getpid())
    with pytest.raises(EOFError):  # its end of the pipe was the only one
        pipe.recv()
    process.join(30)
    assert (process.pid, process.exitcode) == (waiting.pid, 7)
    assert "to the parent's output" in capfd.readouterr().out


def test_its_own_processes_begin_ahead_too() -> None:
    waiting = begin(children=(AheadProcess(__name__, (IMPORTED,)),))
    process, pipe = start(with_a_child)
    inner, imported, _, parent = pipe.recv()
    assert (imported, parent) == (True, waiting.pid)
    assert pipe.recv() == (waiting.pid, inner, 7)
    process.join(30)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [("OMP_NUM_THREADS", {}), ("VLLM_BATCH_INVARIANT", {"fixed": ("VLLM_",)})],
    ids=["read by torch", "read by a module"],
)
def test_process_that_began_otherwise_is_not_taken(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    waiting = begin(**options)
    monkeypatch.setenv(name, "17")
    process, pipe = start()
    pid, imported, _, _ = pipe.recv()
    assert pid == process.pid != waiting.pid
    assert not imported
    assert not waiting.is_running()
    assert f"{process.name} starts anew: others would have set {name}" in capfd.readouterr().err


def test_variables_that_are_foreseen_or_free_may_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = begin(environment={"VLLM_A": "1"}, fixed=("VLLM_",), free=("VLLM_B",))
    monkeypatch.setenv("VLLM_A", "1")
    monkeypatch.setenv("VLLM_B", "2")
    _, pipe = start()
    assert pipe.recv()[0] == waiting.pid


def test_process_that_has_ended_is_not_taken() -> None:
    waiting = begin()
    waiting.kill()
    process, pipe = start()
    pid, imported, _, _ = pipe.recv()
    assert pid == process.pid != waiting.pid
    assert not imported


def test_failed_import_is_left_to_the_new_process() -> None:
    spawn_ahead([AheadProcess(__name__, ("no_such_module",))])
    waiting = module._waiting[-1].pid
    process, pipe = start()
    assert pipe.recv()[0] == process.pid != waiting


def test_other_processes_leave_it_waiting() -> None:
    waiting = begin()
    other = SPAWN.Process(target=os.getpid)
    other.start()
    other.join(30)
    assert other.exitcode == 0
    assert start()[1].recv()[0] == waiting.pid


def test_unused_ones_are_ended() -> None:
    waiting = begin()
    end_unused()
    assert not waiting.is_running()


def test_they_end_with_whoever_began_them(tmp_path: Path) -> None:
    code = (
        "import os; from posttrain.core.spawn_ahead import *; from posttrain.core import spawn_ahead as m\n"
        "spawn_ahead([AheadProcess('os', ('json',), children=(AheadProcess('os', ('json',)),))])\n"
        "print(m._waiting[0].pid, flush=True); input(); os._exit(0)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        waiting = psutil.Process(int(parent.stdout.readline()))
        while not (children := waiting.children()):
            waiting.status()
        parent.communicate(b"\n")
    for process in (waiting, *children):
        process.wait(30)
