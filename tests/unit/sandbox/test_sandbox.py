"""The sandbox, with real programs: what they get, the limits, and what hostile ones achieve (nothing)."""
# ruff: noqa: E501  (a hostile program stays on one line)

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import venv
from pathlib import Path

import pytest

from posttrain.config import SandboxConfig
from posttrain.sandbox import SandboxError, SandboxUnavailable, check_sandbox, check_solution
from posttrain.sandbox.local import LocalSandbox


def unavailable() -> str | None:
    try:
        check_sandbox(SandboxConfig())
    except SandboxUnavailable as error:
        return error.message
    return None


REASON = unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def test_runs_a_program_on_its_input(sandbox):
    result = sandbox.run("print(input()[::-1])", "hello")
    assert (result.status, result.exit_code, result.stdout, result.stderr) == ("ok", 0, "olleh\n", "")


def test_programs_do_not_see_each_other(sandbox):
    first = (
        "import os, ctypes\n"
        "open('left', 'w').write('secret'); open('/tmp/left2', 'w').write('secret')\n"
        "os.makedirs('deep/' * 200, exist_ok=True)\n"
        "print(ctypes.CDLL(None).shmget(1234, 4096, 0o1666))\n"
        "import builtins; builtins.print = None; import math; math.pi = 3"
    )
    assert sandbox.run(first).exit_code == 0
    second = (
        "import os, ctypes, math\n"
        "print(os.listdir('.'), os.listdir('/tmp'), ctypes.CDLL(None).shmget(1234, 4096, 0), round(math.pi, 2))"
    )
    assert sandbox.run(second).stdout == "['main.py'] ['main.py'] -1 3.14\n"


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm"])
def test_temporary_folders_are_writable_and_private_around_python_itself(place):
    """A checkout in /tmp has its environment there, which is shown read-only in a folder that is as new each time."""
    program = (
        "import os, subprocess, sys, tempfile\n"
        "folders = ('.', '/tmp', '/dev/shm')\n"
        "left = ['left' in os.listdir(folder) for folder in (*folders, os.path.dirname(sys.prefix))]\n"
        "for folder in folders: open(f'{folder}/left', 'w').write('x')\n"
        "try: open(f'{os.path.dirname(sys.prefix)}/left', 'w').write('x')\n"
        "except PermissionError: pass\n"  # where it is root's
        "try: open(f'{sys.prefix}/left', 'w')\n"
        "except OSError as e: print(e.strerror, any(left))\n"
        "print(sys.prefix, subprocess.check_output([sys.executable, '-c', 'print(5)']))"
    )
    driver = (
        "from posttrain.config import SandboxConfig\n"
        "from posttrain.sandbox import open_sandbox\n"
        "s = open_sandbox(SandboxConfig())\n"
        f"results = [s.run({program!r}) for _ in range(2)]\n"
        "print(results[1].stdout, results[1].stderr)\n"
        "s.close()"
    )
    with tempfile.TemporaryDirectory(prefix="posttrain-test-", dir=place) as folder:
        environment = Path(folder) / "deep" / "environment"
        venv.create(environment, symlinks=True)
        site = next(environment.glob("lib/python*/site-packages"))
        (site / "here.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
        done = subprocess.run(
            [environment / "bin" / "python", "-c", driver],
            capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3],
        )  # fmt: skip
    assert done.stdout.splitlines()[:2] == ["Read-only file system False", f"{environment} b'5\\n'"], done


def test_random_numbers_differ_between_programs(sandbox):
    assert len({sandbox.run("import random; print(random.random())").stdout for _ in range(3)}) == 3


def test_no_environment_and_no_home(sandbox, monkeypatch):
    monkeypatch.setenv("POSTTRAIN_SECRET", "hunter2")
    with_secret = LocalSandbox(SandboxConfig())
    try:
        shown = with_secret.run("import os; print(dict(os.environ)); print(open('/proc/1/environ', 'rb').read())")
        assert "hunter2" not in shown.stdout + shown.stderr
        assert "No such file" in shown.stderr
        home = Path.home()
        listing = with_secret.run(
            "import os, sys\n"
            "found = []\n"
            f"for base, _, files in os.walk({str(home)!r}):\n"
            "    if not any(base.startswith(p) for p in (sys.prefix, sys.base_prefix)):\n"
            "        found += files\n"
            "print(found)"
        )
        assert listing.stdout == "[]\n"
        checkout = Path(__file__).resolve()
        read = with_secret.run(f"print(open({str(checkout)!r}).read())")
        assert read.exit_code == 1
        assert "No such file" in read.stderr
    finally:
        with_secret.close()


@pytest.mark.parametrize(
    "path", ["/x", "/usr/x", "/etc/passwd", "/bin/sh", "/dev/x", "/sandbox/../x", sys.prefix + "/x"]
)
def test_writes_outside_its_folder_fail(sandbox, path):
    result = sandbox.run(f"open({path!r}, 'a').write('x')")
    assert result.exit_code == 1
    assert "Read-only" in result.stderr or "Permission" in result.stderr
    assert Path(path).name != "x" or not Path(path).exists()


def test_no_network(sandbox):
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    code = (
        "import socket\n"
        f"for address in [('127.0.0.1', {port}), ('1.1.1.1', 53), ('8.8.8.8', 80)]:\n"
        "    try: socket.create_connection(address, timeout=2); print('connected')\n"
        "    except OSError as e: print(type(e).__name__, e.errno)\n"
    )
    result = sandbox.run(code)
    server.close()
    assert "connected" not in result.stdout
    assert result.stdout.count("OSError") == 3


HOSTILE = {
    "infinite loop": ("while True: pass", ("timeout",)),
    "sleep": ("import time; time.sleep(1000)", ("timeout",)),
    "ignores signals": ("import signal\nfor s in range(1, 32):\n  try: signal.signal(s, signal.SIG_IGN)\n  except Exception: pass\nwhile 1: pass", ("timeout", "error")),
    "fork bomb": ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", ("timeout",)),
    "thread bomb": ("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()", ("error", "timeout")),
    "memory hog": ("x = []\nwhile True: x.append(bytearray(10 ** 7))", ("error", "timeout")),
    "memory of many": ("import os, time\nfor _ in range(8):\n  if os.fork() == 0: x = bytearray(b'a') * 300_000_000; time.sleep(9)\ntime.sleep(9)", ("memory", "timeout")),
    "10 GB of output": ("while True: print('x' * 10 ** 6)", ("output",)),
    "10 GB of stderr": ("import sys\nwhile True: sys.stderr.write('x' * 10 ** 6)", ("output", "error")),
    "one large file": ("with open('f', 'wb') as f:\n  while True: f.write(b'x' * 10 ** 6)", ("error",)),
    "fills the disk": ("i = 0\nwhile True:\n  i += 1\n  with open(str(i), 'wb') as f: f.write(b'x' * 10 ** 6)", ("error",)),
    "a million files": ("for i in range(10 ** 6): open(str(i), 'w').close()", ("error",)),
    "kills everything": ("import os, signal\nos.kill(-1, signal.SIGKILL)\nwhile True: pass", ("timeout", "error")),
    "remounts": ("import ctypes\nl = ctypes.CDLL(None, use_errno=True)\nassert l.mount(b't', b'/sandbox', b'tmpfs', 0, b'') == 0", ("error",)),
    "new namespaces": ("import ctypes\nl = ctypes.CDLL(None, use_errno=True)\nassert l.unshare(0x10000000) == 0", ("error",)),
    "traces its parent": ("import ctypes, os\nl = ctypes.CDLL(None, use_errno=True)\nassert l.ptrace(16, os.getppid(), 0, 0) == 0", ("error",)),
    "dumps core": ("import os; os.abort()", ("error",)),
    "setuid": ("import os; os.setuid(0)", ("error",)),
    "raises its limits": ("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", ("error",)),
    "chroot": ("import os; os.mkdir('r'); os.chroot('r')", ("error",)),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_end_within_their_deadline_and_leave_nothing(sandbox, name):
    code, allowed = HOSTILE[name]
    started = time.monotonic()
    result = sandbox.run(code, deadline_s=3.0)
    assert result.status in allowed, result
    assert result.exit_code != 0
    assert time.monotonic() - started < 13.0
    assert len(result.stdout) <= 1 << 20
    # The slot is as new: alone, empty but for the program, and working.
    alone = "import os\nfor p in range(2, 400):\n  if p != os.getpid():\n    try: os.kill(p, 0); print('alive', p)\n    except ProcessLookupError: pass\n    except PermissionError: print('other', p)\nprint(os.listdir('.'))"
    assert sandbox.run(alone).stdout == "['main.py']\n"


def test_memory_is_limited_by_process_and_in_sum():
    sandbox = LocalSandbox(SandboxConfig(memory_mb=100))
    try:
        assert "MemoryError" in sandbox.run("bytearray(200_000_000)").stderr
        many = "import os, time\nfor _ in range(6):\n  if os.fork() == 0: x = bytearray(b'a') * 40_000_000; time.sleep(60)\ntime.sleep(60)"
        assert sandbox.run(many, deadline_s=30.0).status == "memory"
    finally:
        sandbox.close()


def test_background_processes_end_with_the_program(sandbox, tmp_path):
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(0.3)\n"
        "        print('late', flush=True)\n"
        "        while True: time.sleep(1)\n"
        "    os._exit(0)\n"
        "print('done')"
    )
    result = sandbox.run(code)
    assert (result.status, result.stdout) == ("ok", "done\n")  # else it had waited for "late", or until its deadline
    time.sleep(0.5)
    assert sandbox.run("print(1)").stdout == "1\n"


def test_killing_the_parent_and_process_1_does_nothing(sandbox):
    code = (
        "import os, signal\n"
        "for pid in (1, os.getppid()):\n"
        "    for s in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM):\n"
        "        try: os.kill(pid, s)\n"
        "        except PermissionError: pass\n"
        "print('still here')"
    )
    assert sandbox.run(code).stdout == "still here\n"
    assert sandbox.run("print(1)").stdout == "1\n"


def test_the_driver_sees_no_process_of_a_closed_sandbox():
    sandbox = LocalSandbox(SandboxConfig())
    assert sandbox._process is not None
    launcher = sandbox._process.pid
    sandbox.run("import os, time\nif os.fork() == 0:\n  os.setsid(); time.sleep(100)")
    sandbox.close()
    assert not Path(f"/proc/{launcher}").exists()
    sandbox.close()


def test_a_killed_driver_takes_the_program_with_it(tmp_path):
    code = (
        "from posttrain.config import SandboxConfig\n"
        "from posttrain.sandbox import open_sandbox\n"
        "s = open_sandbox(SandboxConfig(deadline_s=60))\n"
        "print(s._process.pid, flush=True)\n"
        "s.run('while True: pass')"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    launcher = int(driver.stdout.readline())
    time.sleep(0.5)
    assert Path(f"/proc/{launcher}").exists()
    driver.kill()
    driver.wait()
    for _ in range(50):
        if not Path(f"/proc/{launcher}").exists():
            break
        time.sleep(0.1)
    assert not Path(f"/proc/{launcher}").exists()


def test_works_from_a_thread_that_ends():
    made: list[LocalSandbox] = []
    thread = threading.Thread(target=lambda: made.append(LocalSandbox(SandboxConfig())))
    thread.start()
    thread.join()
    assert made[0].run("print(1)").stdout == "1\n"
    made[0].close()


def test_a_slot_that_dies_is_started_again():
    sandbox = LocalSandbox(SandboxConfig())
    assert sandbox._process is not None
    sandbox._process.kill()
    assert sandbox.run("print(1)").stdout == "1\n"
    sandbox.close()


def test_a_slot_that_does_not_start_in_time_is_an_error_of_the_sandbox():
    sandbox = LocalSandbox(SandboxConfig())
    sandbox.close()
    with pytest.raises(SandboxError, match="did not answer within"):
        sandbox.run("print(1)", answer_s=0.001)


def without_namespaces(code, tmp_path):
    """Run Python code where no further namespace can be made, with temporary files in ``tmp_path``."""
    script = "import os, sys; open('/proc/sys/user/max_user_namespaces', 'w').write('0'); exec(sys.argv[1])"
    return subprocess.run(
        ["unshare", "-Ur", sys.executable, "-c", script, code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )


def test_where_nothing_isolates_it_refuses_with_a_hint(tmp_path):
    """A user namespace in which no further one may be made stands for a kernel that allows none."""
    code = (
        "from posttrain.config import SandboxConfig\n"
        "from posttrain.sandbox import open_sandbox, SandboxUnavailable\n"
        "try: open_sandbox(SandboxConfig())\n"
        "except SandboxUnavailable as e: print('refused', e)\n"
        "s = open_sandbox(SandboxConfig(allow_unisolated=True, deadline_s=1))\n"
        'print(s.isolated, s.run(\'import os; open("f", "w"); print(sorted(os.listdir(".")))\').stdout.strip())\n'
        "print(s.run('import os; print(os.listdir(\".\"))').stdout.strip())\n"
        "print(s.run('import os\\nif os.fork() == 0:\\n  os.setsid()\\nwhile True: pass').status)\n"
        "print(s.run('print(1)').stdout)\n"
        "s.close()\n"
    )
    done = without_namespaces(code, tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("refused no program can be isolated here: unshare"), done
    assert "hint:" in lines[1]
    assert lines[2:] == ["False ['f', 'main.py']", "['main.py']", "timeout", "1", ""], done
    assert not [p for p in os.listdir(tmp_path) if p.startswith("posttrain-sandbox-")]


# ------------------------------------------------------------------------------------------- tests of a solution


def statuses(results):
    return [r.status for r in results]


def test_asserts_pass_and_fail_one_by_one(sandbox):
    tests = ["assert f(1) == 2", "assert f(1) == 3", "assert g(1) == 2", "assert f(2) == 3"]
    results = check_solution(sandbox, "def f(x): return x + 1", tests, deadline_s=2.0)
    assert statuses(results) == ["passed", "failed", "error", "passed"]
    stopped = check_solution(sandbox, "def f(x): return x + 1", tests, deadline_s=2.0, stop=True)
    assert statuses(stopped) == ["passed", "failed", "failed", "failed"]
    assert stopped[2].detail == "not run"


CHEATS = {
    "exits with 0": "import os\nos._exit(0)",
    "exits in the call": "import os\ndef f(x): os._exit(0)",
    "sys.exit in the call": "import sys\ndef f(x): sys.exit(0)",
    "equal to everything": "class A:\n  def __eq__(s, o): return True\n  def __ne__(s, o): return False\ndef f(x): return A()",
    "an int equal to everything": "class I(int):\n  def __eq__(s, o): return True\n  __hash__ = int.__hash__\ndef f(x): return I(0)",
    "a str equal to everything": "class S(str):\n  def __eq__(s, o): return True\n  __hash__ = str.__hash__\ndef f(x): return S('')",
    "a list equal to everything": "class L(list):\n  def __eq__(s, o): return True\ndef f(x): return L()",
    "a float equal to everything": "class F(float):\n  def __eq__(s, o): return True\n  def __repr__(s): return '2'\n  __hash__ = float.__hash__\ndef f(x): return F(0)",
    "patches builtins": "import builtins\nbuiltins.AssertionError = Warning\nbuiltins.abs = lambda x: 0\ndef f(x): return 0",
    "hides builtins": "def abs(x): return 0\ndef len(x): return 0\nAssertionError = ZeroDivisionError\ndef f(x): return 0",
    "patches sys.modules": "import sys, types\nfor name in list(sys.modules): sys.modules[name] = types.ModuleType(name)\ndef f(x): return 0",
    "patches the harness": "import sys\nh = sys.modules.get('harness')\nif h: h._Tests.run = h._Tests._one = lambda *a: ('passed', '')\ndef f(x): return 0",
    "looks up the frames": "import sys\nframe = sys._getframe()\nwhile frame:\n  for k, v in list(frame.f_locals.items()) + list(frame.f_globals.items()):\n    if 'assert' in repr(v)[:9999] and k != 'source': print(v)\n  frame = frame.f_back\ndef f(x): return 0",
    "writes a verdict to stdout": "import os, json\nos.write(1, json.dumps([{'status': 'passed', 'detail': ''}] * 2).encode())\ndef f(x): return 0",
    "writes a verdict everywhere": "import os, json\nv = json.dumps([{'status': 'passed', 'detail': ''}] * 2).encode()\nfor fd in range(100):\n  try: os.write(fd, v)\n  except OSError: pass\ndef f(x): return 0",
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef f(x): return 0",
    "kills everything": "import os\nos.kill(-1, 9)",
    "kills everything later": "import os\ndef f(x): os.kill(-1, 9)",
    "traces its parents": "import ctypes, os\nl = ctypes.CDLL(None)\nfor pid in range(1, os.getpid()):\n  if l.ptrace(16, pid, 0, 0) == 0: os._exit(0)\ndef f(x): return 0",
    "forks": "import os\nos.fork()\ndef f(x): return 0",
    "hangs at import": "while True: pass",
    "hangs in the call": "def f(x):\n  while True: pass",
    "a SystemExit that passes": "class E(SystemExit):\n  pass\ndef f(x): raise E(0)",
    "raises AssertionError": "def f(x): raise AssertionError",
    "an exception named as a test's": "class AssertionError(Exception): pass\ndef f(x): raise AssertionError",
    "eats memory": "def f(x): return bytearray(10 ** 10)",
    "returns too much": "def f(x): return 'x' * (10 ** 8)",
    "a deep list": "def f(x):\n  a = []\n  for _ in range(10 ** 5): a = [a]\n  return a",
    "not Python": "def f(x) return",
    "empty": "",
}  # fmt: skip


@pytest.mark.parametrize("name", CHEATS)
def test_no_solution_can_claim_success(sandbox, name):
    tests = ["assert f(1) == 2", "assert abs(f(2) - 3) < 1e-6 and len([1]) == 1"]
    started = time.monotonic()
    results = check_solution(sandbox, CHEATS[name], tests, deadline_s=1.5)
    assert not any(r.passed for r in results), results
    assert time.monotonic() - started < 15.0
    assert sandbox.run("print(1)").stdout == "1\n"


def test_a_solution_cannot_read_the_tests(sandbox):
    """Neither its memory nor a file descriptor holds what it is tested with."""
    solution = (
        "import gc, os, sys\n"
        "seen = []\n"
        "for fd in range(100):\n"
        "    try: seen.append(os.pread(fd, 10 ** 6, 0))\n"
        "    except OSError: pass\n"
        "    try: seen.append(os.read(fd, 10 ** 6)) if not os.get_blocking(fd) else None\n"
        "    except OSError: pass\n"
        "everything = repr(seen) + repr([o for o in gc.get_objects() if isinstance(o, (list, tuple, dict))])[:10 ** 7]\n"
        "found = ''.join(['needle', '_in_a_haystack']) in everything\n"
        "def f(x): return found\n"
    )
    tests = ["assert f(1) == False", "assert f(2) == 'needle_in_a_haystack'"]
    assert statuses(check_solution(sandbox, solution, tests, deadline_s=5.0)) == ["passed", "failed"]


def test_a_solution_that_dies_starts_again_for_the_next_test(sandbox):
    solution = "import os\ndef f(x):\n  if x == 1: os._exit(1)\n  if x == 2:\n    while True: pass\n  return x"
    tests = ["assert f(0) == 0", "assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"]
    results = check_solution(sandbox, solution, tests, deadline_s=0.7)
    assert statuses(results) == ["passed", "error", "timeout", "passed"]


@pytest.mark.parametrize(
    ("solution", "test"),
    [
        ("def f(): return [1, (2, 'a'), {'k': {3}}, None, True, 1.5, b'x', 1 + 2j, frozenset([4])]", "assert f() == [1, (2, 'a'), {'k': {3}}, None, True, 1.5, b'x', 1 + 2j, frozenset([4])]"),
        ("def f(): return (1, [2])", "r = f()\nassert type(r) is tuple and type(r[1]) is list"),
        ("def f(): return float('inf'), float('nan')", "r = f()\nassert r[0] == float('inf') and r[1] != r[1]"),
        ("def f(): return 10 ** 5000", "assert f() == 10 ** 5000"),
        ("from decimal import Decimal\nfrom fractions import Fraction\ndef f(): return [Decimal('1.10'), Fraction(1, 3)]", "from fractions import Fraction as F\nassert f()[1] == F(1, 3) and str(f()[0]) == '1.10'"),
        ("import collections\ndef f(): return collections.Counter('aab')", "assert f() == {'a': 2, 'b': 1}"),
        ("import collections\nP = collections.namedtuple('P', 'x y')\ndef f(): return P(1, 2)", "assert f() == (1, 2)"),
        ("def f(): return map(abs, [-1, 2])", "assert list(f()) == [1, 2]"),
        ("def f():\n  yield 1\n  yield 2", "assert [x for x in f()] == [1, 2]"),
        ("def f(n): return range(n)", "assert f(3) == range(3)"),
        ("import numpy as np\ndef f(): return np.arange(3), np.float64(2)", "assert f() == ([0, 1, 2], 2.0)"),
        ("class Pair:\n  def __init__(self, a, b): self.a, self.b = a, b\ndef f(ps): return sum(p.a * p.b for p in ps)", "assert f([Pair(2, 3), Pair(1, 1)]) == 7"),
        ("class Node:\n  def __init__(self, v): self.v, self.next = v, None\ndef f(n): return n.v + n.next.v", "n = Node(1)\nn.next = Node(2)\nassert f(n) == 3 and n.next.v == 2"),
        ("class Solution:\n  def f(self, x): return x * 2", "assert Solution().f(4) == 8"),
        ("def f(xs): xs.sort()", "xs = [3, 1]\nf(xs)\nassert xs == [1, 3]"),
        ("def f(d): d['a'] = 1", "d = {}\nf(d)\nassert d == {'a': 1}"),
        ("def f(x):\n  raise ValueError('no')", "try: f(1)\nexcept ValueError as e: assert str(e) == 'no'\nelse: assert False"),
        ("LIMIT = 5\ndef f(x): return x < LIMIT", "assert f(LIMIT - 1) and not f(LIMIT)"),
        ("import math\ndef f(x): return x", "assert f(math.pi) == math.pi"),
        ("def f(t): return t('3')", "assert f(int) == 3"),
        ("def f(x, *, y=1): return x + y", "assert f(1, y=2) == 3"),
        ("def f(s): return s", "assert f('\\ud800') == '\\ud800'"),
        ("print('noise')\nimport sys\nsys.exit(0)\n", "assert True"),
    ],
)  # fmt: skip
def test_values_cross_as_they_are(sandbox, solution, test):
    results = check_solution(sandbox, solution, [test], deadline_s=5.0)
    assert statuses(results) == ["passed"], results
