"""What an error says about processes that died or do not answer."""

import asyncio
import concurrent.futures
import math
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from posttrain.cluster import actors, calls
from posttrain.cluster.actors import (
    ActorContext,
    ActorHandle,
    Diagnosis,
    Process,
    _kill,
    diagnose_process,
    stack_in,
    tail_of,
)
from posttrain.cluster.calls import cause_of_death
from posttrain.core.errors import RunError, WorkerError


def test_reads_the_end_of_a_log(tmp_path):
    log = tmp_path / "worker.err"
    assert tail_of(log) == ()
    lines = [":job_id:01000000", ":actor_name:TrainActor", "", *(f"line {n}" for n in range(5000)), "x" * 500]
    log.write_bytes(b"\xff\n" + "\n".join(lines).encode())
    found = tail_of(log)
    assert len(found) == 15
    assert found[-2:] == ("line 4999", "x" * 200)
    log.write_text(":job_id:01\nonly this\n")
    assert tail_of(log) == ("only this",)


THREADS = """
import faulthandler, sys, threading, time

ready, done = threading.Event(), threading.Event()

def somewhere_deep(depth):
    if depth:
        somewhere_deep(depth - 1)
    else:
        ready.set()
        while not done.is_set():
            time.sleep(0.01)

def main():
    threads = [threading.Thread(target=somewhere_deep, args=(30,)), threading.Thread(target=done.wait)]
    for thread in threads:
        thread.start()
    ready.wait()
    faulthandler.dump_traceback(sys.stdout, all_threads=True)
    done.set()

main()
"""


def test_shortens_stacks_to_busy_threads():
    """Of threads that do something; what is ours comes first. In a process of its own: others leave threads here."""
    dump = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True).stdout
    ours = "\nThread 0x01 (most recent call first):\n"
    ours += '  File "/x/site-packages/torch/nn.py", line 3 in mean\n' * 11
    ours += '  File "/src/posttrain/train/worker.py", line 7 in update\n'
    ours += '  File "/x/site-packages/ray/actor.py", line 1 in f\n'
    found = stack_in(dump + ours)
    assert found[:12] == (*["torch/nn.py:3 in mean"] * 10, "/src/posttrain/train/worker.py:7 in update", "")
    assert sum("in somewhere_deep" in line for line in found) == 10
    assert not any("threading.py" in line and "in wait" in line for line in found)
    assert stack_in("") == ()


def test_names_node_without_the_drivers_folder(tmp_path, monkeypatch):
    home = ActorContext(str(tmp_path / "project"), [])
    with pytest.raises(RunError, match=rf"node [\d.]+ has no folder {home.folder}, where the command was started"):
        home.enter()
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path)
    home.enter()
    assert os.getcwd() == home.folder == ActorContext.of_driver([]).folder


@pytest.fixture
def child():
    """A process that shows its stacks at SIGUSR1, and how to reach it."""
    script = (
        "import time; from posttrain.core.stacks import write_stacks_at_signal\n"
        "write_stacks_at_signal()\n"
        "def waiting(): print(flush=True); time.sleep(100)\n"
        "waiting()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        created = psutil.Process(process.pid).create_time()
        yield Process("node", process.pid, created, None, 0, "10.0.0.7")
        process.kill()


def test_examines_a_process(child):
    for _ in range(2):  # each time only what is new
        found = diagnose_process(child, True)
        # It lives, and waits; what the kernel has killed meanwhile may be of tests beside this one.
        assert found == Diagnosis(stack=found.stack, oom_kills=found.oom_kills)
        assert found.stack == ("<string>:3 in waiting", "<string>:4 in <module>")
    assert not diagnose_process(child, False).stack
    os.kill(child.pid, signal.SIGSTOP)
    while psutil.Process(child.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    assert diagnose_process(child, True).stopped
    os.kill(child.pid, signal.SIGKILL)
    psutil.Process(child.pid).wait(10)
    assert diagnose_process(child, True).ended


PARENT = """
import multiprocessing, subprocess, sys, time
from posttrain.core.stacks import write_stacks_at_signal

def silent():  # a child that does not write its stacks, which the signal would end
    time.sleep(100)

def in_the_child(ready):
    write_stacks_at_signal()
    ready.set()
    time.sleep(100)

def in_the_parent():
    fork = multiprocessing.get_context("fork")
    for _ in range(2):
        ready = fork.Event()
        fork.Process(target=in_the_child, args=(ready,), daemon=True).start()
        ready.wait()
    fork.Process(target=silent, daemon=True).start()
    subprocess.Popen(["sleep", "100"])
    print(flush=True)
    time.sleep(100)

write_stacks_at_signal()
in_the_parent()
"""


def test_shows_where_the_processes_are_that_it_has_started():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        found = psutil.Process(process.pid)
        children = found.children()
        try:
            parent, deadline = Process("node", process.pid, found.create_time(), None, 0, "10.0.0.7"), time.time() + 60
            heading = f"in {children[0].name()}, which it has started:"
            # One that gets no CPU writes late, and a child may not have come to its sleep yet.
            stack = diagnose_process(parent, True).stack
            while stack.count(heading) != 1 or "in_the_parent" not in stack[0]:
                assert time.time() < deadline, stack
                stack = diagnose_process(parent, True).stack
            assert stack[stack.index(heading) + 1].endswith("in in_the_child")  # both are there, which is shown once
            assert [child.is_running() and child.status() for child in children] == ["sleeping"] * 4
        finally:
            for each in (*children, found):
                each.kill()


def test_a_process_that_others_leave_no_cpu_works(monkeypatch):
    monkeypatch.setattr(actors, "_WORKS", math.inf)
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    ) as busy:
        busy.stdout.readline()
        assert actors._works(psutil.Process(busy.pid))
        busy.kill()


@pytest.mark.parametrize("ask", [False, True])
def test_process_that_ends_while_examined_has_ended(child, ask, monkeypatch):
    find = Process.find

    def find_and_lose(self):
        found = find(self)
        os.kill(self.pid, signal.SIGKILL)
        psutil.Process(self.pid).wait(10)
        return found

    monkeypatch.setattr(Process, "find", find_and_lose)
    assert diagnose_process(child, ask).ended


def test_does_not_kill_a_process_that_has_ended(child, monkeypatch):
    found = child.find()
    os.kill(child.pid, signal.SIGKILL)
    psutil.Process(child.pid).wait(10)
    monkeypatch.setattr(Process, "find", lambda self: found)
    _kill(child)


def test_does_not_take_a_reused_pid_for_the_process(child):
    other = Process("node", child.pid, child.created - 10, None, 0, "10.0.0.7")
    assert diagnose_process(other, True).ended
    assert psutil.Process(child.pid).is_running()


class Seen(ActorHandle):
    """One that was looked at."""

    def __init__(self, name, pid, found):
        super().__init__(name, actor=object(), silence_s=60.0)
        self.process = Process("node-7", pid, 0.0, f"/logs/{pid}.err", 0, "10.0.0.7")
        self.found = found

    async def diagnose(self, *, stacks=True, within_s=8.0):
        return self.found


def test_groups_processes_that_hang_at_the_same_line():
    same = Diagnosis(stack=("torch/distributed.py:1 in all_reduce",), log=("a warning",))
    handles = [Seen("worker 0", 10, same), Seen("worker 1", 11, Diagnosis(works=True, stack=("user.py:3 in f",)))]
    handles += [Seen("worker 2", 12, same), Seen("worker 3", 13, None), Seen("worker 4", 14, Diagnosis(stopped=True))]
    error = asyncio.run(calls._late(handles, "update", 5.0))
    assert error.message.splitlines() == [
        "worker 0, worker 1, worker 2, worker 3, worker 4 did not finish update within 5 s",
        "worker 0 (process 10), worker 2 (process 12): waiting here, innermost call first:",
        "  torch/distributed.py:1 in all_reduce",
        "the end of its log, /logs/10.err:",
        "  a warning",
        "worker 1 (process 11): at work here, innermost call first:",
        "  user.py:3 in f",
        "worker 3 (process 13): node 10.0.0.7 does not answer",
        "its log: /logs/13.err on node 10.0.0.7",
        "worker 4 (process 14): stopped, by SIGSTOP or a debugger",
    ]
    assert all(handle.unresponsive for handle in handles)


def test_reports_death_for_lack_of_memory():
    handle = Seen("worker 0", 10, Diagnosis(ended=True, log=("last",), oom_kills=2))
    error = asyncio.run(calls._failure(handle, ActorDiedError(), "update"))
    assert "ended processes for lack of memory" in error.message
    assert error.message.endswith("the end of its log, /logs/10.err:\n  last")
    assert "more memory" in error.hint


UNAVAILABLE = ActorUnavailableError("RpcError: recvmsg:Connection reset by peer", b"1" * 16)
"""What Ray says of an actor that has just been lost with its node."""


def test_a_lost_node_is_named():
    died = ActorDiedError()
    died.error_msg = "The actor died because its node has died. Node Id: 12"
    for error in (died, UNAVAILABLE):
        told = asyncio.run(calls._failure(Seen("worker 1", 10, None), error, "update"))
        assert told.message == (
            "worker 1 died during update: its node has died or cannot be reached (10.0.0.7)\n"
            "its log: /logs/10.err on node 10.0.0.7"
        )
        assert "fewer cluster.workers" in told.hint


def test_a_lost_connection_to_a_process_that_has_ended_is_a_crash():
    told = asyncio.run(calls._failure(Seen("worker 1", 10, Diagnosis(ended=True)), UNAVAILABLE, "update"))
    assert told.message == "worker 1 died during update: its process was killed or crashed"
    assert "was it killed" in told.hint


class Reference:
    """A call that fails with an error after some seconds."""

    def __init__(self, after_s, error):
        self.after_s, self.error = after_s, error

    def future(self):
        found = concurrent.futures.Future()
        threading.Timer(self.after_s, found.set_exception, [self.error]).start()
        return found


@pytest.mark.parametrize("first", [0, 1])
def test_the_actor_that_was_lost_first_is_named(first):
    """NCCL ends the processes of other ranks after it has lost one."""
    refs = [Reference(0.05 if index == first else 0.3, ActorDiedError()) for index in (0, 1)]
    handles = [Seen(f"worker {index}", index, Diagnosis(ended=True)) for index in (0, 1)]
    for handle in handles:
        handle.process = None  # nobody to ask for heartbeats
    with pytest.raises(WorkerError, match=f"worker {first} died during update"):
        asyncio.run(calls.gather(refs, handles, "update", 20.0))


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("The actor is dead because it was killed by `ray.kill`.", "it was killed by `ray.kill`."),
        (
            "x\nThe actor is dead because its worker process has died. Worker exit detail: Worker unexpectedly exits "
            "with a connection error code 2. End of file. Some common causes include: (1) the process was killed",
            "its process was killed or crashed",
        ),
        ("The actor died because its node has died. Node Id: 12", "its node has died. Node Id: 12"),
        ("The actor is dead because " + "memory " * 100, ("memory " * 100)[:400] + " ..."),
        ("nothing known", "nothing known"),
    ],
)
def test_reports_the_cause_of_a_death(told, expected):
    error = ActorDiedError()
    error.error_msg = told
    assert cause_of_death(error) == expected
