"""Child processes: what the driver is told of one that answers, hangs, dies or has processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import psutil
import pytest

from posttrain.core.child_process import ChildProcess


def echo(pipe: Connection) -> None:
    pipe.send([signal.getsignal(signal.SIGINT) is signal.SIG_IGN, sys.stdout is sys.stderr])
    pipe.send(pipe.recv() * 2)


def with_a_child(pipe: Connection) -> None:
    started = subprocess.Popen(["sleep", "60"])
    pipe.send(started.pid)
    time.sleep(60)


def dying(pipe: Connection) -> None:
    os._exit(7)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_answers_and_leaves_interrupts_and_stdout_to_the_driver(method: str) -> None:
    child = ChildProcess(echo, method=method)  # type: ignore[arg-type]
    assert child.receive(30) == [True, True]
    child.pipe.send(21)
    assert child.receive(30) == 42
    assert child.exit_code() == 0


def test_child_that_hangs_misses_the_deadline_and_is_killed_with_its_family() -> None:
    child = ChildProcess(with_a_child, method="fork")
    grandchild = psutil.Process(child.receive(30))
    with pytest.raises(TimeoutError, match=f"process {child.pid} sent nothing"):
        child.receive(0)
    child.kill(family=True)
    assert child.exit_code() == -signal.SIGKILL
    grandchild.wait(30)


def test_child_that_dies_is_the_end_of_its_pipe_and_has_an_exit_code() -> None:
    child = ChildProcess(dying, method="fork")
    with pytest.raises(EOFError):
        child.receive(30)
    assert child.exit_code() == 7
