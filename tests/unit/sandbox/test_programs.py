"""Programs in the sandbox begin, run and end as Python runs a file."""
# ruff: noqa: E501  (a program stays on one line)

import pytest

from tests.unit.sandbox.test_sandbox import REASON

pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.mark.parametrize(
    ("code", "exit_code", "where", "text"),
    [
        ("1/0", 1, "stderr", "line 1"),
        ("def (", 1, "stderr", "SyntaxError"),
        ("import sys; print('a'); sys.exit(3)", 3, "stdout", "a"),
        ("import sys; sys.exit('bad')", 1, "stderr", "bad"),
        ("import os; print('lost'); os.kill(os.getpid(), 9)", -9, "stdout", ""),
        ("import os, sys; print('kept', flush=True); os._exit(7)", 7, "stdout", "kept"),
        ("import atexit; atexit.register(print, 'bye')", 0, "stdout", "bye"),
        ("import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()", 0, "stdout", "late"),
        ("import numpy; print(numpy.arange(3).sum())", 0, "stdout", "3"),
        ("import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', 'print(5)']).decode())", 0, "stdout", "5"),
        ("import multiprocessing as m\nwith m.get_context('fork').Pool(2) as p: print(p.map(abs, [-1, -2]))", 0, "stdout", "[1, 2]"),
        ("import tempfile\nwith tempfile.NamedTemporaryFile('w+') as f: f.write('x'); f.seek(0); print(f.read())", 0, "stdout", "x"),
        ("if __name__ == '__main__': print('main')", 0, "stdout", "main"),
        ("print(__builtins__.len('abc'))", 0, "stdout", "3"),
        ("out = open(1, 'w')\nout.write('kept')", 0, "stdout", "kept"),
        ("class Out:\n  def __init__(s): import sys, io; s.f = io.TextIOWrapper(sys.stdout.buffer); s.me = s\nout = Out()\nprint('kept', file=out.f)", 0, "stdout", "kept"),
        ("import io, sys\nprint('kept')\nsys.stdout = io.StringIO()", 0, "stdout", "kept"),
        ("import sys, codecs\nsys.stdout = codecs.getwriter('utf8')(sys.stdout.detach())\nprint('kept')", 0, "stdout", "kept"),
        ("class A:\n  def __del__(s): say('bye')\ndef say(x): print(x)\na = A()", 0, "stdout", "bye"),
        ("import sys\nprint('kept')\nsys.stdout.close()", 0, "stdout", "kept"),
        ("print('héllo €')", 0, "stdout", "héllo €"),
        ("import sys; sys.setrecursionlimit(10**6)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(20000))", 0, "stdout", "20000"),
    ],
)  # fmt: skip
def test_behaves_as_python_does(sandbox, code, exit_code, where, text):
    result = sandbox.run(code)
    assert result.exit_code == exit_code, result
    assert text in getattr(result, where)
