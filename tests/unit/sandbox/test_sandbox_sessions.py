"""Sessions of the sandbox, with real cells: state that stays, output that is each cell's own, and hostile cells."""
# ruff: noqa: E501  (a hostile cell stays on one line)

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from posttrain.config import SandboxConfig
from posttrain.sandbox import SandboxError
from posttrain.sandbox.local import LocalSandbox
from posttrain.sandbox.syscalls import SyscallFilter
from tests.unit.sandbox.test_sandbox import REASON, without_namespaces

pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture
def session(sandbox):
    opened = sandbox.session()
    yield opened
    opened.close()


def test_variables_imports_and_functions_stay(session):
    assert session.run("import math\nx = 20\ndef f(y): return x + y").stdout == ""
    assert session.run("x += 1").stdout == ""
    assert session.run("f(math.floor(2.5))").stdout == "23\n"
    assert session.run("print(__name__, [n for n in ('x', 'f', 'math') if n in globals()])").stdout == (
        "__main__ ['x', 'f', 'math']\n"
    )


@pytest.mark.parametrize(
    ("cell", "stdout"),
    [
        ("1 + 1", "2\n"),
        ("x = 3\nx", "3\n"),
        ("'a'", "'a'\n"),
        ("None", ""),
        ("x = 5", ""),
        ("print('p')\n7", "p\n7\n"),
        ("for i in range(2):\n    i", ""),
        ("", ""),
        ("# only a comment", ""),
        ("3; 4", "4\n"),
        ("[\n 1,\n 2,\n]", "[1, 2]\n"),
        ("'héllo €'", "'héllo €'\n"),
        ("'\\ud800'", "'\\ud800'\n"),
        ("import sys; sys.stdout.write('ab') and None", "ab"),
        ("import os; os.system('echo shell')\nNone", "shell\n"),
        ("import sys\nsys.exit()", ""),
    ],
)
def test_the_value_of_a_last_expression_is_shown(session, cell, stdout):
    result = session.run(cell)
    assert (result.status, result.stdout, result.stderr) == ("ok", stdout, "")


def test_a_program_can_show_its_last_value_too(sandbox):
    shown = sandbox.run("x = input()\nx * 2", "ab", echo=True)
    assert (shown.status, shown.stdout) == ("ok", "'abab'\n")
    assert sandbox.run("1 + 1").stdout == ""
    failed = sandbox.run("y = 1\nz", echo=True)
    assert (failed.status, failed.exit_code) == ("error", 1)
    assert failed.stderr.splitlines()[:2] == [
        "Traceback (most recent call last):",
        '  File "/sandbox/main.py", line 2, in <module>',
    ]
    assert failed.stderr.splitlines()[-1] == "NameError: name 'z' is not defined"


def test_an_exception_shows_its_own_lines_and_costs_nothing(session):
    session.run("def half(x):\n    return x / 0")
    result = session.run("y = 1\nhalf(4)")
    assert (result.status, result.exit_code, result.session_ended) == ("error", 1, False)
    assert [line for line in result.stderr.splitlines() if not set(line) <= set(" ~^")] == [
        "Traceback (most recent call last):",
        '  File "<cell 2>", line 2, in <module>',
        "    half(4)",
        '  File "<cell 1>", line 2, in half',
        "    return x / 0",
        "ZeroDivisionError: division by zero",
    ]
    assert session.run("y").stdout == "1\n"
    assert "SyntaxError" in session.run("def (").stderr
    assert session.run("import sys; sys.exit('bad')").stderr == "bad\n"
    assert session.run("import sys; sys.exit(3)").exit_code == 3
    assert session.run("y").stdout == "1\n"


def test_output_belongs_to_its_cell(session):
    result = session.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\nkept = sys.stdout")
    assert (result.stdout, result.stderr) == ("out\n", "err\n")
    assert session.run("kept.write('late'); print('now')").stdout == "latenow\n"
    # A stream that was closed, replaced or lost does not harm the next cell.
    for harm in ("sys.stdout.close()", "import os; os.close(1); os.close(2)", "sys.stdout = None"):
        session.run(harm)
        assert session.run("print('still here')").stdout == "still here\n"


def test_each_cell_ends_without_input(session):
    assert "EOFError" in session.run("input()").stderr


def test_a_loop_is_interrupted_and_the_session_goes_on(session):
    session.run("x = 1")
    for cell in ("while True: x += 1", "import time; time.sleep(100)"):
        started = time.monotonic()
        result = session.run(cell, deadline_s=0.3)
        assert (result.status, result.exit_code, result.session_ended) == ("timeout", None, False)
        assert "KeyboardInterrupt" in result.stderr
        assert time.monotonic() - started < 50.0
        assert session.run("x > 0").stdout == "True\n"


def test_a_cell_that_does_not_heed_the_interrupt_ends_the_session(session):
    session.run("x = 1")
    stubborn = (
        "import time; print('began', flush=True)\n"
        "while True:\n"
        "    try: time.sleep(9)\n"
        "    except KeyboardInterrupt: pass"
    )
    result = session.run(stubborn, deadline_s=0.3)
    assert (result.status, result.session_ended, result.stdout) == ("timeout", True, "began\n")
    assert "NameError" in session.run("x").stderr
    assert session.run("1").stdout == "1\n"


def test_what_a_cell_leaves_running_stands_still_between_cells(session):
    session.run(
        "import threading, time\n"
        "ticks = 0\n"
        "def tick():\n"
        "    global ticks\n"
        "    while True: ticks += 1; time.sleep(0.01)\n"
        "threading.Thread(target=tick).start()"
    )
    before = int(session.run("ticks").stdout)
    time.sleep(1.0)
    assert int(session.run("ticks").stdout) - before < 30
    session.run("time.sleep(0.3)")
    assert int(session.run("ticks").stdout) - before > 20


def test_processes_that_a_cell_forks(session):
    # The child comes to the end of the cell as well, and must not go on as a second session.
    result = session.run(
        "import os\npid = os.fork()\nprint('child' if pid == 0 else os.waitpid(pid, 0)[1], flush=True)"
    )
    assert sorted(result.stdout.split()) == ["0", "child"]
    assert session.run("pid > 0").stdout == "True\n"
    shown = session.run(
        "import multiprocessing as m\nwith m.get_context('fork').Pool(2) as p: print(p.map(abs, [-1, -2]))"
    )
    assert shown.stdout == "[1, 2]\n", shown
    shown = session.run("import subprocess, sys\nsubprocess.check_output([sys.executable, '-c', 'print(5)'])")
    assert shown.stdout == "b'5\\n'\n"


ENDS = {
    "exits": ("import os; print('kept', flush=True); os._exit(7)", "error", 7),
    "exits well": ("import os; os._exit(0)", "ok", 0),
    "kills itself": ("import os; os.kill(os.getpid(), 9)", "error", -9),
    "crashes": ("import ctypes; ctypes.string_at(0)", "error", -11),
    "stops itself": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "timeout", None),
    "closes everything": ("import os; os.closerange(0, 256)", None, None),
    "ignores signals": ("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass", "timeout", None),
    "memory of many": ("import os, time\nfor _ in range(8):\n  if os.fork() == 0: x = bytearray(b'a') * 300_000_000; time.sleep(9)\ntime.sleep(9)", "memory", None),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_a_cell_that_destroys_its_session_costs_that_session_only(sandbox, name):
    cell, status, code = ENDS[name]
    session = sandbox.session()
    session.run("x = 1")
    started = time.monotonic()
    result = session.run(cell, deadline_s=10.0 if status == "memory" else 1.0)
    assert time.monotonic() - started < 8.0
    assert result.session_ended
    if status is not None:
        assert (result.status, result.exit_code) == (status, code), result
    assert "NameError" in session.run("x").stderr
    assert session.run("import os; x = 2; os.listdir('.')").stdout == "[]\n"
    assert session.run("x").stdout == "2\n"
    session.close()


SURVIVES = {
    "memory": ("x = bytearray(10 ** 10)", "error", "MemoryError"),
    "10 GB of output": ("while True: print('x' * 10 ** 6)", "output", "File too large"),
    "10 GB of stderr": ("import sys\nwhile True: sys.stderr.write('x' * 10 ** 6)", "output", ""),
    "one large value": ("'x' * 10 ** 7", "output", ""),
    "one large file": ("with open('f', 'wb') as f:\n  while True: f.write(b'x' * 10 ** 6)", "error", "File too large"),
    "kills everything": ("import os, signal\nos.kill(-1, signal.SIGKILL)", "error", "ProcessLookupError"),
    "fork bomb": ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", "timeout", "KeyboardInterrupt"),
    "recursion": ("def f(): f()\nf()", "error", "RecursionError"),
    "a value that cannot be shown": ("class A:\n  def __repr__(s): return 5\nA()", "error", "TypeError"),
    "deep source": ("(" * 10_000, "error", "SyntaxError"),
    "thread bomb": ("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(0.1,), daemon=True).start()", None, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", SURVIVES)
def test_a_cell_that_meets_a_limit_leaves_the_session_alive(session, name):
    cell, status, said = SURVIVES[name]
    session.run("kept = 41")
    result = session.run(cell, deadline_s=1.0 if status == "timeout" else 10.0)
    assert status in (None, result.status), result
    assert said in result.stderr
    assert not result.session_ended
    assert max(len(result.stdout), len(result.stderr)) <= 1 << 20
    follow = session.run("kept + 1")
    assert (follow.stdout, follow.stderr) == ("42\n", "")


def test_a_session_can_lie_to_itself_only(sandbox, session):
    """A cell that writes to the connection answers for itself, and for later cells; nothing else hears it."""
    session.run("x = 1")
    result = session.run(
        "import os, time\nfor _ in range(3): os.write(3, b'\\0garbage' * 1000)\ntime.sleep(0.3)\nx = 2"
    )
    assert result.status in ("ok", "error", "timeout")
    for _ in range(5):
        assert len(session.run("x").stdout) < 100
    session.close()
    assert sandbox.run("print(1)").stdout == "1\n"
    again = sandbox.session()
    assert again.run("'x' in globals()").stdout == "False\n"
    again.close()


def test_a_session_that_answers_ahead_of_its_cells_holds_nobody_up(session):
    cell = "import os, time\nfor _ in range(200):\n  try: os.write(3, b'\\0')\n  except OSError: break\ntime.sleep(60)"
    session.run(cell, deadline_s=1.0)
    started = time.monotonic()
    assert not [result.stdout for result in (session.run("1", deadline_s=1.0) for _ in range(40)) if result.stdout]
    assert time.monotonic() - started < 30.0
    session.close()
    assert session.run("1").stdout == "1\n"


def test_a_closed_session_leaves_nothing_and_its_sandbox_goes_on(sandbox):
    session = sandbox.session()
    session.run("import os, time\nopen('left', 'w').write('x')\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(100)")
    session.close()
    session.close()
    alone = "import os\nfor p in range(2, 400):\n  if p != os.getpid():\n    try: os.kill(p, 0); print('alive', p)\n    except ProcessLookupError: pass\nprint(os.listdir('.'))"
    assert sandbox.run(alone).stdout == "['main.py']\n"
    assert sandbox.session().run(alone).stdout == "[]\n"
    sandbox.close()


def test_closing_the_sandbox_ends_its_session():
    sandbox = LocalSandbox(SandboxConfig())
    session = sandbox.session()
    session.run("import os, time\nif os.fork() == 0:\n  os.setsid(); time.sleep(100)")
    assert sandbox._process is not None
    launcher = sandbox._process.pid
    sandbox.close()
    assert not Path(f"/proc/{launcher}").exists()
    session.close()


def test_a_cell_that_fails_on_our_side_leaves_no_session(sandbox, monkeypatch):
    session = sandbox.session()
    assert session.run("secret = 42").status == "ok"
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "run_cell", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.run("secret")
    session.close()
    other = sandbox.session()
    assert "NameError" in other.run("secret").stderr
    other.close()


def test_abort_ends_what_runs_and_nothing_else():
    sandbox = LocalSandbox(SandboxConfig(deadline_s=30.0))
    try:
        sandbox.abort()  # nothing runs: nothing happens
        assert sandbox.run("print(1)").stdout == "1\n"
        session = sandbox.session()
        session.run("x = 1")
        for run in (session.run, sandbox.run):
            timer = threading.Timer(0.3, sandbox.abort)
            timer.start()
            started = time.monotonic()
            result = run("import time\ntime.sleep(20)")
            assert (result.status, result.exit_code) == ("aborted", None)
            assert time.monotonic() - started < 15.0
            timer.join()
        sandbox.abort()
        assert sandbox.run("print(2)").stdout == "2\n"
    finally:
        sandbox.close()


def test_a_cell_keeps_no_memory_in_the_files_of_its_output(session):
    """Each cell has files of its own, and none may be a place for memory that outlives the cell uncounted."""
    for _ in range(2):
        shown = session.run("import os\nkept = [os.dup(fd) for fd in (1, 2)]\nprint('x' * 100_000)")
        assert (shown.status, shown.stdout) == ("ok", "x" * 100_000 + "\n")
        session.run("sizes = [os.fstat(fd).st_size for fd in kept]")
        assert session.run("sizes").stdout == "[0, 0]\n"
        assert "Operation not permitted" in session.run("os.pwrite(kept[0], b'x', 0)").stderr


WITHOUT_SECCOMP = """
import ctypes, errno, os, struct
from posttrain.sandbox import syscalls
seccomp = syscalls._SYS_SECCOMP[syscalls._MACHINES[os.uname().machine][0]]
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, seccomp), (0x06, 0, 0, 0x50000 | errno.ENOSYS), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == libc.prctl(22, 2, ctypes.byref(syscalls._Program(4, ctypes.addressof(code))), 0, 0) == 0
"""
"""Stands for a kernel that has no seccomp."""


@pytest.mark.slow
@pytest.mark.skipif(SyscallFilter.find() is None, reason="this kernel has none, which other tests then show")
def test_a_session_that_wakes_between_cells_ends():
    """Without a filter, a file that others read can send SIGCONT: the stopped process runs, and is found to."""
    cell = (
        "import fcntl, os, signal, time\n"
        "folder = os.open(os.path.dirname(os.__file__), 0)\n"
        "fcntl.fcntl(folder, 10, signal.SIGCONT)\n"  # F_SETSIG
        "fcntl.fcntl(folder, fcntl.F_NOTIFY, fcntl.DN_ACCESS | fcntl.DN_MULTISHOT) and None"
    )
    driver = (
        f"{WITHOUT_SECCOMP}\n"
        "import time\n"
        "from posttrain.config import SandboxConfig\n"
        "from posttrain.sandbox.local import LocalSandbox\n"
        "sandbox = LocalSandbox(SandboxConfig())\n"
        "session = sandbox.session()\n"
        f"print(sandbox.gaps, session.run({cell!r}).status)\n"
        "for _ in range(30):\n"  # longer than from one look to the next
        "    time.sleep(0.1); open(os.__file__).read()\n"
        "print(session.run('1').session_ended)\n"
        "sandbox.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", driver], capture_output=True, text=True, timeout=60, check=False)
    gaps = "('no filter of system calls: the kernel or this architecture has no seccomp',)"
    assert done.stdout.splitlines() == [f"{gaps} ok", "True"], done


@pytest.mark.skipif(SyscallFilter.find() is None, reason="this kernel has none, which other tests then show")
def test_the_session_keyring_is_not_ours():
    """Where no filter closes the calls: a key of the driver's session keyring is not in the program's."""
    search = "libc.syscall({call}, 10, -3, b'user', b'posttrain-test', 0)"
    search = search.format(call="{'x86_64': 250, 'aarch64': 219}[os.uname().machine]")
    driver = (
        f"{WITHOUT_SECCOMP}\n"
        "from posttrain.config import SandboxConfig\n"
        "from posttrain.sandbox.local import LocalSandbox\n"
        "keyctl, add = {'x86_64': (250, 248), 'aarch64': (219, 217)}[os.uname().machine]\n"
        "libc.syscall(keyctl, 1, None)\n"  # one of this test's own
        "libc.syscall(add, b'user', b'posttrain-test', b'secret', 6, -3)\n"
        "sandbox = LocalSandbox(SandboxConfig())\n"
        f"found = sandbox.run({f'import ctypes, os; libc = ctypes.CDLL(None); print({search})'!r})\n"
        f"print({search} > 0, found.stdout)\n"
        "sandbox.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", driver], capture_output=True, text=True, timeout=60, check=False)
    seen, _, inside = done.stdout.partition(" ")
    if seen != "True":
        pytest.skip(f"no keyrings here: {done.stderr}")
    assert inside.strip() == "-1", done


def test_a_sandbox_that_dies_says_that_the_state_is_lost():
    sandbox = LocalSandbox(SandboxConfig())
    session = sandbox.session()
    session.run("x = 1")
    assert sandbox._process is not None
    sandbox._process.kill()
    sandbox._process.wait()
    time.sleep(0.2)  # what was in it ends with it
    with pytest.raises(SandboxError, match="the sandbox died"):
        session.run("x")
    assert "NameError" in session.run("x").stderr
    session.close()
    sandbox.close()


def test_sessions_where_nothing_isolates(tmp_path):
    """The limits hold, and a killed session leaves no process, without namespaces too."""
    code = (
        "from posttrain.config import SandboxConfig\n"
        "from posttrain.sandbox import open_sandbox\n"
        "s = open_sandbox(SandboxConfig(allow_unisolated=True, deadline_s=1))\n"
        "c = s.session()\n"
        "print(s.isolated, c.run('x = 1').status, c.run('x').stdout.strip())\n"
        "print(c.run('while True: pass').status, c.run('x').stdout.strip())\n"
        "import os\n"
        "pid = int(c.run('import os, time\\npid = os.fork()\\nif pid == 0:\\n  os.setsid(); time.sleep(99)\\npid').stdout)\n"
        "c.close()\n"
        "print(os.path.exists(f'/proc/{pid}'))\n"
        "print(c.run('import os; os.kill(os.getppid(), 9)').session_ended, c.run('1').stdout.strip())\n"
        "c.close(); print(s.run('print(2)').stdout.strip()); s.close()\n"
    )
    done = without_namespaces(code, tmp_path)
    assert done.stdout.splitlines() == ["False ok 1", "timeout 1", "False", "True 1", "2"], done
    assert not [p for p in os.listdir(tmp_path) if p.startswith("posttrain-sandbox-")]
