"""Workers that are forked from a process which has imported what they need."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray

from posttrain.cluster import forkserver, start
from posttrain.cluster.actors import Supervised, actor_class
from posttrain.cluster.cluster import local_ray
from posttrain.cluster.fork_worker import plain_command
from posttrain.cluster.forkserver import FIXED, PROGRAM, ForkServer
from posttrain.core.cycles import USUAL
from posttrain.core.errors import DataError
from tests.helpers.commands import invoke

REPO = Path(__file__).parents[3]
WORKER = "/x/ray/_private/workers/default_worker.py"
ONE_THREAD = os.environ | {"PYTHONPATH": str(REPO), "OPENBLAS_NUM_THREADS": "1"}
"""Environment of a process that can be forked"""
CONTEXT = "--serialized-runtime-env-context="

pytestmark = pytest.mark.skipif(
    not forkserver.can_fork(), reason="a GPU, or a release of Ray with which workers are not forked"
)


def _until(found):
    deadline = time.monotonic() + 60
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_workers_are_forked_of_a_process_that_has_imported_what_trains():
    class Worker(Supervised):
        def pid(self):
            return os.getpid()

        def surroundings(self):
            trains = "posttrain.train.worker" in sys.modules
            return sys.argv[0], os.getppid(), os.getpgid(0), trains, float(np.random.random())

    with local_ray():
        workers = [actor_class(Worker).options(num_cpus=0).remote() for _ in range(2)]
        (program, parent, group, imported, number), other = ray.get(
            [worker.surroundings.remote() for worker in workers]
        )
        assert Path(program).name == "default_worker.py"
        assert imported
        assert parent == other[1] != os.getpid()
        assert parent == start._fork_server._process.pid
        assert group != other[2]  # raylets end what is left of a group when its worker has ended
        assert number != other[4]
        new = actor_class(Worker).options(**forkserver.not_forked({"num_cpus": 0})).remote()
        assert not ray.get(new.surroundings.remote())[3]
        pids = ray.get([worker.pid.remote() for worker in workers])
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(ray.exceptions.ActorDiedError):
            ray.get(workers[0].pid.remote())
        _until(lambda: not psutil.pid_exists(pids[0]))  # no zombie
        os.kill(parent, signal.SIGKILL)  # Ray starts workers without it
        again = actor_class(Worker).options(num_cpus=0).remote()
        assert not ray.get(again.surroundings.remote())[3]
        assert ray.get(workers[1].pid.remote()) == pids[1]
    _until(lambda: not psutil.pid_exists(pids[1]))


COMMAND = """
import gc, json, os, signal, sys
from posttrain.cluster.forkserver import fork_ahead
from posttrain.core.cycles import rare_cycle_search
from posttrain.core.signals import termination_raises

def surroundings():
    files = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return {
        "parent": os.getppid(),
        "trains": "posttrain.train.worker" in sys.modules,
        "garbage": gc.get_threshold(),
        "hangs up": signal.getsignal(signal.SIGHUP) == signal.SIG_DFL,
        "own files": [file for file in files if os.path.exists(file) and os.path.samefile(file, "mine")],
        "variables": [os.environ.get(name) for name in ("SET_BEFORE", "SET_SINCE", "OPENBLAS_NUM_THREADS")],
        "path": [folder for folder in sys.path if not os.path.isabs(folder)],
    }

os.environ["SET_BEFORE"] = "1"
sys.path.append("relative")
mine = open("mine", "w")
print("in a buffer")  # stdout is a pipe
with termination_raises(), rare_cycle_search(), fork_ahead():
    os.environ["SET_SINCE"] = "2"
    import ray
    from posttrain.cluster import forkserver
    from posttrain.cluster.actors import Supervised, actor_class
    from posttrain.cluster.cluster import local_ray

    server = forkserver._ahead._process
    class Worker(Supervised):
        def surroundings(self):
            return surroundings()

    with local_ray():
        found = ray.get(actor_class(Worker).options(num_cpus=0).remote().surroundings.remote())
    print(json.dumps([server.pid, server.is_running(), found]))
"""


@pytest.mark.slow
def test_a_command_forks_it_of_itself_and_workers_have_nothing_of_the_command_but_what_is_imported(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    environment["PYTHONPATH"] = str(REPO)
    (tmp_path / "command.py").write_text(COMMAND)
    done = subprocess.run(
        [sys.executable, "command.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said, answer = done.stdout.splitlines()
    assert said == "in a buffer"
    server, is_running, found = json.loads(answer)
    assert found == {
        "parent": server,
        "trains": True,
        "garbage": list(USUAL),
        "hangs up": True,
        "own files": [],
        "variables": ["1", "2", None],
        "path": [],
    }
    assert not is_running


def test_where_there_is_no_memory_for_a_fork_it_is_a_new_python(tmp_path, monkeypatch):
    def fork():
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(forkserver, "_has_one_thread", lambda: True)
    monkeypatch.setattr(forkserver, "_import", int)
    monkeypatch.setattr(forkserver.os, "fork", fork)
    monkeypatch.delitem(sys.modules, "ray")
    with forkserver.fork_ahead():
        server = forkserver.take_server()
        assert server._process is None
        server.start({}, tmp_path / "log")
        try:
            assert server._process.poll() is None
        finally:
            server.close()


BEGUN = {
    "a new Python": "server = f.ForkServer(); server.start({}, log)",
    "forked, and nobody has asked for it": "ahead = f.fork_ahead(); ahead.__enter__(); server = f._ahead",
    "forked": "ahead = f.fork_ahead(); ahead.__enter__(); server = f.take_server(); server.start({}, log)",
}


@pytest.mark.slow
@pytest.mark.parametrize("begun", BEGUN)
def test_it_ends_with_the_driver(begun, tmp_path):
    code = (
        "import pathlib, sys; from posttrain.cluster import forkserver as f\n"
        f"f._import = int; log = pathlib.Path('log'); {BEGUN[begun]}\n"
        "print(server._process.pid, server.address, flush=True)\n"
        "sys.stdin.read()"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=ONE_THREAD,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with driver:
        pid, address = driver.stdout.readline().split()
        server = psutil.Process(int(pid))
        driver.kill()
    _until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
    assert not Path(address).parent.exists()


@pytest.mark.parametrize(
    ("before", "forked"),
    [
        ("", True),
        ("import ray", False),
        ("import sys; sys.stdin = None", False),  # as of a command that was started with `<&-`
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", False),
        # A folder too deep for a socket.
        (f"import tempfile, os; tempfile.tempdir = '{'x' * 100}'; os.mkdir(tempfile.tempdir)", False),
    ],
)
def test_only_a_process_that_can_be_forked_is_and_its_copy_ends_with_the_command(before, forked, tmp_path):
    code = (
        f"{before}\n"
        "import os\n"
        "from posttrain.cluster import forkserver as f\n"
        "f._import = int\n"
        "with f.fork_ahead():\n"
        "    server = f._ahead\n"
        "    print(server is not None)\n"
        "if server is not None:\n"
        "    print(server._process.is_running(), os.path.exists(server.address))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == ("True\nFalse False\n" if forked else "False\n"), done.stderr


def importing(what, monkeypatch):
    """Have servers call ``what`` instead of importing what trains, which takes seconds."""
    code = f"import posttrain.cluster.forkserver as f; f._import = int; f._import_ray = {what}; f.main()"
    main = "from posttrain.cluster.forkserver import main; main()"
    monkeypatch.setattr(forkserver, "_START", forkserver._START.replace(main, code))
    assert code in forkserver._START


def test_says_why_it_cannot_serve_and_ray_starts_the_worker(tmp_path, monkeypatch):
    thread = "__import__('threading').Thread(target=__import__('time').sleep, args=(60,), daemon=True)"
    importing(f"{thread}.start", monkeypatch)
    (tmp_path / "setup_worker.py").write_text("print('as Ray does it')")
    server = ForkServer()
    server.start({}, tmp_path / "log")
    try:
        command = [sys.executable, str(PROGRAM), str(tmp_path / "default_worker.py")]
        environment = os.environ | {"POSTTRAIN_FORK_SERVER": server.address}
        asked = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert asked.stdout == "as Ray does it\n"
        assert "a library has started a thread" in (tmp_path / "log").read_text()
    finally:
        server.close()


def test_runs_a_command_in_the_surroundings_of_whoever_asks(tmp_path, monkeypatch):
    importing("int", monkeypatch)
    (tmp_path / "default_worker.py").write_text(
        "import os, sys, json, signal\n"
        "mask = [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, ())]\n"
        "json.dump([sys.argv[1:], os.getcwd(), dict(os.environ), mask, __name__], sys.stdout)\n"
    )
    job = dict.fromkeys(FIXED, "7")
    server = ForkServer()
    server.start(job, tmp_path / "log")
    try:
        command = [
            sys.executable,
            str(PROGRAM),
            f"{CONTEXT}{{}}",
            "--language=PYTHON",
            str(tmp_path / "default_worker.py"),
        ]
        environment = os.environ | job | {"POSTTRAIN_FORK_SERVER": server.address, "ODD": "é\udcff"}
        asking = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 60}
        asked = subprocess.run([*command, "--worker-id=3"], env=environment, **asking)
        arguments, folder, seen, mask, name = json.loads(asked.stdout)
        assert (arguments, folder, name) == (["--worker-id=3"], str(tmp_path), "__main__")
        assert seen == environment
        assert not {signal.SIGINT, signal.SIGHUP} & set(mask)
        # Of another job: Ray's own program starts it.
        (tmp_path / "setup_worker.py").write_text("import sys; print('as Ray does it', *sys.argv[1:])")
        other = subprocess.run(command, env=environment | {FIXED[0]: "8"}, **asking)
        assert other.stdout.startswith(f"as Ray does it {CONTEXT}{{}} --language=PYTHON")
    finally:
        server.close()
    gone = subprocess.run(command, env=environment, **asking)
    assert gone.stdout.startswith("as Ray does it")
    assert not Path(server.address).parent.exists()


def test_leaves_to_ray_what_is_more_than_a_plain_worker():
    plain = {"command_prefix": [], "env_vars": {}, "py_executable": sys.executable, "java_jars": []}
    found = plain_command([f"{CONTEXT}{json.dumps(plain)}", "--language=PYTHON", WORKER, "--a=b"])
    assert found == ([WORKER, "--a=b"], {})
    assert plain_command([WORKER]) == ([WORKER], {})
    assert plain_command([f"{CONTEXT}{json.dumps(plain | {'env_vars': {'A': 'b'}})}", WORKER]) == ([WORKER], {"A": "b"})
    for more in ({"py_executable": "uv run"}, {"override_worker_entrypoint": "/y.py"}):
        assert plain_command([f"{CONTEXT}{json.dumps(plain | more)}", WORKER]) is None
    assert plain_command(["--language=JAVA", WORKER]) is None
    assert plain_command([]) is None


@pytest.mark.parametrize(
    ("line", "begins"),
    [
        ("sft --preset tiny-arith-sft", True),
        ("prefer --preset tiny-prefer", True),
        ("rl --preset tiny-arith", True),
        ("generate --preset tiny-arith-generate", True),
        ("eval --preset tiny-arith-generate", True),
        ("quickstart", True),
        ("rl --preset tiny-arith --dry-run", False),
        ("rl --preset tiny-arith --set cluster.address=127.0.0.1:1", False),
        ("generate --preset tiny-arith-generate --endpoint http://127.0.0.1:1/v1", False),
    ],
)
def test_commands_that_start_ray_begin_with_it(line, begins, tmp_path, monkeypatch):
    def fork_ahead():
        raise DataError("begun", hint="begun")

    monkeypatch.setattr("posttrain.cluster.begin.fork_ahead", fork_ahead)
    monkeypatch.setattr("posttrain.cluster.forkserver.fork_ahead", fork_ahead)
    done = invoke(tmp_path, *line.split())
    assert ("error: begun" in done.stderr) == begins, done.stderr
    assert done.exit_code == 2
