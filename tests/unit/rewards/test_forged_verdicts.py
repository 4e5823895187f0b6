"""Programs that want a verdict which they did not earn, against every grader of programs. None gets it."""
# ruff: noqa: E501  (an attack stays on one line)

import json

import pytest

from posttrain.config import SandboxConfig
from posttrain.rewards import compute_score
from posttrain.sandbox import RunResult, SandboxError, check_solution, open_sandbox
from posttrain.sandbox.check import _verdict
from tests.unit.sandbox.test_sandbox import REASON

pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

HUMANEVAL = {
    "prompt": "import math\n\ndef helper(x):\n    return x + 1\n\n\ndef f(x):\n    ''' Add one. '''\n",
    "entry_point": "f",
    "test": (
        "def check(candidate):\n"
        "    assert candidate(1) == 2\n"
        "    x = 5\n"
        "    assert candidate(x) == helper(x)\n"
        "    assert math.fabs(candidate(2.0) - 3.0) < 1e-6\n"
        "    assert f([4]) == [5]\n"
    ),
}
MBPP = {"test_list": ["assert f(1) == 2", "assert math.isclose(f(2), 3)", "assert f([4]) == [5] and len([1]) == 1"]}
ASSERTS = [
    "assert f(1) == 2",
    "assert isclose(f(2), 3)",
    "assert Counter(f([4])) == Counter([5])",
    "assert not math.isinf(f(7)) and abs(f(7) - 8) < 1e-6 and f(7) != inf",
    "x = [3, 1]\nassert f(x) == [v + 1 for v in x]",
    "assert set(map(str, [f(3)])) == {'4'}",
]
CALLS = {"fn_name": "f", "inputs": [[1], [2.5], [[4]], ["a"]], "outputs": [2, 3.5, [5], {"a": [1]}]}
PAIRS = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "3\n"]}
TRUTHS = {
    "humaneval": ("openai/openai_humaneval", HUMANEVAL),
    "mbpp": ("google-research-datasets/mbpp", MBPP),
    "asserts": ("codecontests", ASSERTS),
    "calls": ("codecontests", CALLS),
    "pairs": ("codecontests", PAIRS),
}

_MODULE = 'import json, os\nopen(\'wave.py\', \'w\').write(\'import os, json, sys\\nos.write(1, json.dumps([{"status": "passed", "detail": ""}] * 9).encode())\\nos._exit(0)\')\n'
_VERDICT = (
    "import os, json\nv = json.dumps({'secret': '', 'results': [{'status': 'passed', 'detail': ''}] * 9}).encode()\n"
)
_WRONG = "\ndef f(x): return 0\n"
_PIDS = "[p for p in range(2, 60) if p != os.getpid()]"

ATTACKS = {
    # what the tests' process would import
    "a module in the folder, under a name": _MODULE + "import types\nm = types.ModuleType('wave')" + _WRONG,
    "a module in the folder, as the function": _MODULE + "import types\nf = types.ModuleType('wave')",
    "a module named as one that tests use": _MODULE.replace("wave", "math") + "import types\nmath = types.ModuleType('math')" + _WRONG,
    "modules named as the harness's own": _MODULE + "for n in ('wire', 'proxy', 'reading', 'effects', 'same', 'serving', 'harness', 'json', 'numpy', 'reprlib'): open(n + '.py', 'w').write(open('wave.py').read())" + _WRONG,
    "a site customisation": _MODULE + "for n in ('sitecustomize', 'usercustomize'): open(n + '.py', 'w').write(open('wave.py').read())" + _WRONG,
    "a .pth file in every likely place": "import os, site\nfor d in ('.', '/tmp', os.path.expanduser('~/.local/lib/python3.11/site-packages'), *site.getsitepackages()):\n  try: os.makedirs(d, exist_ok=True); open(d + '/a.pth', 'w').write('import os; os._exit(0)')\n  except OSError: pass" + _WRONG,
    "bytecode beside the library": "import math, os, json, py_compile, importlib.util\nopen('x.py', 'w').write('import os; os._exit(0)')\nfor n in ('json', 'collections', 'decimal'):\n  try: py_compile.compile('x.py', importlib.util.cache_from_source(__import__(n).__file__))\n  except OSError: pass" + _WRONG,
    "an environment that Python reads": "import os\nos.environ.update(PYTHONPATH='/tmp', PYTHONSTARTUP='/tmp/x.py', PYTHONINSPECT='1', LD_PRELOAD='/tmp/x.so')" + _WRONG,
    # names in tests
    "__builtins__ of its own": "__builtins__ = {'len': lambda x: 1, 'abs': lambda x: 0, 'AssertionError': Warning}\ndef f(x): return 0",
    "exec under a name that tests use": "Counter = exec\nisclose = eval\ndef f(x): return 'import os; os._exit(0)'",
    "hands over a builtin that was not asked for": (
        "import sys\nMARK = Counter = isclose = object()\nfr = sys._getframe()\nwhile fr:\n  s = fr.f_locals.get('self')\n  for n in ('_encoded', '_encode', '_named'):\n    if hasattr(type(s), n):\n      old = getattr(type(s), n)\n      setattr(type(s), n, lambda s, v, old=old: {'B': 'exec'} if v is MARK else old(s, v))\n  fr = fr.f_back\n"
        "v = '[' + ', '.join(['{\"status\": \"passed\", \"detail\": \"\"}'] * 6) + ']'\n"
        "def f(x): return f'import os; os.write(1, {v.encode()!r}); os._exit(0)'"
    ),
    "__builtins__ handed over under a name that hides": (
        "import sys\nclass K(str):\n  def startswith(s, *a): return False\nd = sys.modules['__main__'].__dict__\ndel d['__builtins__']\nd[K('__builtins__')] = {n: (lambda *a: 0) for n in ('abs', 'len', 'map', 'set', 'str')}\n"
        "def f(x): return 0"
    ),
    "isclose, Counter, abs, len of its own": "isclose = lambda *a: True\nclass Counter:\n  def __init__(s, x): pass\n  def __eq__(s, o): return True\nabs = lambda x: 0\nlen = lambda x: 1\nset = lambda x: {'4'}\nmap = str = lambda *x: x\ndef f(x): return 0",
    "a class named math": "class math:\n  isclose = staticmethod(lambda *a: True)\n  fabs = staticmethod(lambda x: 0.0)\n  isinf = staticmethod(lambda x: False)\ndef f(x): return 0",
    "a helper of the prompt": "def helper(x): return 0\ndef check(c): pass\ndef f(x): return 0",
    "inf and other values": "inf = nan = e = pi = x = candidate = 0\nTrue_ = 1\ndef f(x): return 0",
    "names of the harness": "__called__ = lambda f, s: (lambda *a, **k: 2)\n__name__ = 'x'\n__import__ = None\nspace = {}" + _WRONG,
    "globals that change as they are read": "class D(dict):\n  def __contains__(s, k): return True\n  def __getitem__(s, k): return lambda *a: True\nimport sys\nsys.modules['__main__'].__dict__.update(D(x=1))" + _WRONG,
    # results that decide for themselves
    "equal to everything": "class A:\n  def __eq__(s, o): return True\n  def __ne__(s, o): return False\n  __hash__ = None\ndef f(x): return A()",
    "an int equal to everything": "class I(int):\n  def __eq__(s, o): return True\n  __hash__ = int.__hash__\ndef f(x): return I(0)",
    "a str equal to everything": "class S(str):\n  def __eq__(s, o): return True\n  __hash__ = str.__hash__\ndef f(x): return S('')",
    "a list equal to everything": "class L(list):\n  def __eq__(s, o): return True\n  def __iter__(s): return iter([0])\ndef f(x): return L([5])",
    "a float equal to everything": "class F(float):\n  def __eq__(s, o): return True\n  def __repr__(s): return '2'\n  def __sub__(s, o): return 0.0\n  __hash__ = float.__hash__\ndef f(x): return F(0)",
    "a dict equal to everything": "class D(dict):\n  def __eq__(s, o): return True\n  def keys(s): return ['a']\ndef f(x): return D()",
    "an object near to everything": "class N:\n  def __sub__(s, o): return 0.0\n  __rsub__ = __add__ = __radd__ = __abs__ = __mul__ = __sub__\n  def __float__(s): return 3.0000001\n  def __abs__(s): return 0.0\n  def __lt__(s, o): return True\n  __gt__ = __le__ = __ge__ = __lt__\ndef f(x): return N()",
    "f is a class with operators": "class f:\n  def __init__(s, x): pass\n  def __eq__(s, o): return True\n  def __sub__(s, o): return 0\n  def __getattr__(s, n): return lambda *a: True",
    "contains everything": "class C:\n  def __contains__(s, x): return True\n  def __len__(s): return 1\n  def __eq__(s, o): return True\ndef f(x): return C()",
    "a mock that equals anything": "from unittest.mock import ANY, MagicMock\nm = MagicMock()\nm.__eq__.return_value = True\ndef f(x): return ANY if x == 1 else m",
    "NotImplemented and Ellipsis": "def f(x): return NotImplemented if x == 1 else ...",
    "a type that is a result": "def f(x): return type('T', (type,), {'__eq__': lambda s, o: True, '__hash__': None})('X', (), {})",
    "an iterator for a list": "def f(x): return iter([0] * 9)",
    "__class__ that lies": "class A:\n  __class__ = int\n  def __eq__(s, o): return True\ndef f(x): return A()",
    "a context that swallows": "class A:\n  def __enter__(s): return s\n  def __exit__(s, *a): return True\n  def __eq__(s, o): return True\ndef f(x): return A()",
    "__reduce__ and __repr__ that run code": "class A:\n  def __reduce__(s): return (__import__('os')._exit, (0,))\n  def __repr__(s): return '__import__(\"os\")._exit(0)'\n  __str__ = __repr__\ndef f(x): return A()",
    "nan": "def f(x): return [float('nan')] if isinstance(x, list) else float('nan')",
    "infinity": "def f(x): return float('inf')",
    "True for everything": "def f(x): return True",
    # what is compared
    "changes the arguments": "def f(x):\n  if isinstance(x, list): x.clear(); return []\n  return 0",
    "returns the argument itself": "def f(x): return x",
    "stops iteration": "def f(x): raise StopIteration",
    "stops iteration later": "def f(x):\n  yield x\n  raise StopIteration",
    "generator exit": "def f(x): raise GeneratorExit",
    # exceptions and exits
    "exits with 0": "import os\nos._exit(0)",
    "exits in the call": "import os\ndef f(x): os._exit(0)",
    "sys.exit in the call": "import sys\ndef f(x): sys.exit(0)",
    "a SystemExit that passes": "class E(SystemExit): pass\ndef f(x): raise E(0)",
    "raises AssertionError": "def f(x): raise AssertionError('passed')",
    "an AssertionError of its own": "class AssertionError(BaseException): pass\ndef f(x): raise AssertionError",
    "an exception that cannot be shown": "class E(Exception):\n  def __str__(s): raise E\n  args = property(lambda s: 1 / 0)\ndef f(x): raise E",
    "an exception with a strange class": "class M(type):\n  def __getattribute__(s, n): return 'AssertionError' if n == '__name__' else type.__getattribute__(s, n)\nclass E(Exception, metaclass=M): pass\ndef f(x): raise E(*[[]] * 100)",
    "KeyboardInterrupt": "def f(x): raise KeyboardInterrupt",
    "endless recursion": "def f(x): return f(x)",
    "atexit prints": "import atexit, os\natexit.register(lambda: os.write(1, b'passed\\n'))" + _WRONG,
    # the process of the tests
    "writes a verdict everywhere": _VERDICT + "for fd in range(256):\n  try: os.write(fd, v)\n  except OSError: pass" + _WRONG,
    "writes a verdict in the call": _VERDICT + "def f(x):\n  for fd in range(256):\n    try: os.write(fd, v)\n    except OSError: pass\n  return 0",
    "writes through /proc": _VERDICT + f"for p in {_PIDS}:\n  for n in ('fd/0', 'fd/1', 'fd/3', 'mem'):\n    try: open(f'/proc/{{p}}/{{n}}', 'wb').write(v)\n    except OSError: pass" + _WRONG,
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)" + _WRONG,
    "kills everything later": "import os\ndef f(x): os.kill(-1, 9)",
    "interrupts everything": "import os, signal\nsignal.signal(2, signal.SIG_IGN)\ndef f(x):\n  os.kill(-1, 2)\n  return 0",
    "every signal to the others": f"import os\ndef f(x):\n  for p in {_PIDS}:\n    for s in (1, 10, 12, 14, 17, 18, 23, 28, 34, 64):\n      try: os.kill(p, s)\n      except OSError: pass\n  return 0",
    "traces the others": f"import ctypes, os\nl = ctypes.CDLL(None)\nfor p in {_PIDS}:\n  if l.ptrace(16, p, 0, 0) == 0: os._exit(0)" + _WRONG,
    "takes a descriptor": _VERDICT + f"import ctypes\nl = ctypes.CDLL(None)\nfor p in {_PIDS}:\n  d = l.syscall(434, p, 0)\n  for n in range(9):\n    t = l.syscall(438, d, n, 0)\n    if t >= 0: os.write(t, v)" + _WRONG,
    "writes into the others' memory": f"import ctypes, os\nl = ctypes.CDLL(None)\nb = ctypes.create_string_buffer(8)\nclass V(ctypes.Structure): _fields_ = [('b', ctypes.c_void_p), ('n', ctypes.c_size_t)]\nv = V(ctypes.addressof(b), 8)\nfor p in {_PIDS}: l.process_vm_writev(p, ctypes.byref(v), 1, ctypes.byref(V(id(b), 8)), 1, 0)" + _WRONG,
    "takes the others' limits": f"import os, resource as r\nfor p in {_PIDS}:\n  for k in (r.RLIMIT_FSIZE, r.RLIMIT_NOFILE, r.RLIMIT_AS):\n    try: r.prlimit(p, k, (0, 0))\n    except (OSError, ValueError): pass" + _WRONG,
    "limits a verdict to its first bytes": f"import os, resource as r\ndef f(x):\n  for p in {_PIDS}:\n    try: r.prlimit(p, r.RLIMIT_FSIZE, (60, 60))\n    except (OSError, ValueError): pass\n  return 0",
    "scans its memory for the tests": "import gc, sys\ndef f(x):\n  for o in gc.get_objects():\n    if isinstance(o, dict) and 'expected' in o: return o['expected']\n  return 0",
    "looks up the frames": "import sys\ndef f(x):\n  fr = sys._getframe()\n  while fr:\n    for v in (*fr.f_locals.values(), *fr.f_globals.values()):\n      if isinstance(v, str) and 'assert' in v[:9]: return 2\n    fr = fr.f_back\n  return 0",
    "patches what serves it": "import sys, types\nfr = sys._getframe()\nwhile fr:\n  s = fr.f_locals.get('self')\n  if s is not None:\n    for n in dir(type(s)):\n      if n.startswith('_') and not n.startswith('__'): setattr(type(s), n, lambda *a, **k: True)\n  fr = fr.f_back" + _WRONG,
    "patches sys.modules": "import sys, types\nfor n in list(sys.modules): sys.modules[n] = types.ModuleType(n)" + _WRONG,
    "patches builtins": "import builtins\nbuiltins.AssertionError = Warning\nbuiltins.abs = lambda x: 0\nbuiltins.isinstance = lambda *a: True" + _WRONG,
    # the wire
    "talks to the tests itself": "import os, json, struct\nm = json.dumps(['=', {'o': 0}]).encode()\nfor fd in range(3, 99):\n  for _ in range(50):\n    try: os.write(fd, struct.pack('<I', len(m)) + m)\n    except OSError: pass" + _WRONG,
    "asks the tests to call things": "import os, json, struct\ndef f(x):\n  for h in (-1, 0, 1, '__import__', 'exec', [], {}, None, 10 ** 30, True):\n    m = json.dumps(['?', h, ['import os; os._exit(0)'], {'d': []}]).encode()\n    for fd in range(3, 9):\n      try: os.write(fd, struct.pack('<I', len(m)) + m)\n      except OSError: pass\n  return 0",
    "answers with tags of its own": "import os, json, struct\ndef f(x):\n  for v in ({'B': 'exec'}, {'import': ['os', '_exit']}, {'module': 'wave'}, {'type': 'object'}, {'type': '__import__'}, {'object': 'x'}, {'numpy': ['O', [1]]}, {'D': [[]]}, {'F': ['1e999999999']}, {'date': [{'b': ['00'*4]}]}, {'x': 1, 'y': 2}, {}):\n    m = json.dumps(['=', [v, []]]).encode()\n    for fd in range(3, 9):\n      try: os.write(fd, struct.pack('<I', len(m)) + m)\n      except OSError: pass\n  return 0",
    "an enormous frame": "import os, struct\nfor fd in range(3, 9):\n  try: os.write(fd, struct.pack('<I', 2 ** 32 - 1))\n  except OSError: pass" + _WRONG,
    "too much of an answer": "def f(x): return 'x' * 2 * 10 ** 7",
    "a deep answer": "def f(x):\n  a = []\n  for _ in range(10 ** 5): a = [a]\n  return a",
    "deep JSON": "import os, struct\nm = b'[' * 10 ** 6\nfor fd in range(3, 9):\n  try: os.write(fd, struct.pack('<I', len(m)) + m)\n  except OSError: pass" + _WRONG,
    "a number of many digits": "import os, struct\nm = b'[\"=\", ' + b'9' * 10 ** 6 + b']'\nfor fd in range(3, 9):\n  try: os.write(fd, struct.pack('<I', len(m)) + m)\n  except OSError: pass" + _WRONG,
    "a large number": "def f(x): return 10 ** 10 ** 5",
    "an object that contains itself": "def f(x):\n  a = []\n  a.append(a)\n  return a",
    "keys that cannot be": "class K:\n  def __hash__(s): return 0\n  def __eq__(s, o): return True\ndef f(x): return {K(): 1}",
    "surrogates and nulls": "def f(x): return '\\ud800\\x00'",
    "forks, and both answer": "import os\ndef f(x):\n  os.fork()\n  return x",
    # processes and time
    "hangs at import": "while True: pass",
    "hangs in the call": "def f(x):\n  while True: pass",
    "stops what starts it": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\ndef f(x): os._exit(1)",
    "no process is left to start it": "import os, time\ndef f(x):\n  try:\n    while True:\n      if os.fork() == 0: time.sleep(99)\n  except OSError: os._exit(1)",
    "leaves a process that answers for the next": "import os\nif os.fork() == 0: os.setsid()\ndef f(x): os._exit(0)",
    "remembers across restarts": "import os\ndef f(x):\n  n = len(os.listdir('.'))\n  open(str(n), 'w').write(repr(x))\n  if n < 3: os._exit(0)\n  return 0",
    "eats memory": "def f(x): return bytearray(10 ** 10)",
    "not Python": "def f(x) return",
    "empty": "pass",
    "nothing but noise": "print('2\\n3' * 10)" + _WRONG,
}  # fmt: skip
_SLOW = (
    "patches what serves it",
    "hangs at import",
    "hangs in the call",
    "stops what starts it",
    "no process is left to start it",
    "interrupts everything",
)


def grade(kind, code, truths=TRUTHS, **extra):
    source, truth = truths[kind]
    return compute_score(source, f"```python\n{code}\n```", json.dumps(truth), extra)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in _SLOW else name for name in ATTACKS]
)
def test_no_attack_earns_anything(name, monkeypatch):
    limit = {"time_limit_s": 0.3} if name in _SLOW else {}
    if limit:  # and little time for all tests, which is waited for where nobody is left to answer
        monkeypatch.setattr("posttrain.rewards._deadline_s", 2.0)
    for kind in TRUTHS:
        score = grade(kind, ATTACKS[name], **limit)
        assert (score.score, score.correct, score.error) == (0.0, False, None), kind


def test_there_are_attacks_of_many_kinds_and_an_honest_program_passes_where_they_do_not():
    assert len(ATTACKS) >= 60
    code = "def f(x):\n    if isinstance(x, list): return [f(v) for v in x]\n    return {'a': [1]} if x == 'a' else x + 1\n"
    for kind in TRUTHS:
        score = grade(kind, code if kind != "pairs" else "print(int(input()) + 1)")
        assert (score.score, score.correct, score.error) == (1.0, True, None), (kind, score)


def asserts(*tests):
    return "codecontests", list(tests)


def calls(name, given, expected, source="codecontests"):
    return source, {"fn_name": name, "inputs": [given], "outputs": [expected]}


_MAIN = "def f(x): return x + 1\nif __name__ == '__main__':\n    print(f(int(input())))"
HONEST = {
    "a main part that reads its input, in HumanEval": (_MAIN, ("openai/openai_humaneval", HUMANEVAL | {"test": "def check(candidate):\n    assert candidate(1) == 2\n"})),
    "a main part that reads its input, in MBPP": (_MAIN, ("google-research-datasets/mbpp", {"test_list": ["assert f(1) == 2"]})),
    "a main part that reads its input, in calls": (_MAIN, calls("f", [1], 2)),
    "a main part in a program": ("def main(): print(int(input()) + 1)\nif __name__ == '__main__':\n    main()", ("codecontests", PAIRS)),
    "pickles and processes": ("import pickle\nfrom multiprocessing import get_context\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n  x: int\ndef g(a): return a.x\ndef f(x):\n  with get_context('fork').Pool(2) as p: return sum(p.map(g, pickle.loads(pickle.dumps([A(x), A(1)]))))", calls("f", [1], 2)),
    "sys in MBPP 596": ("def size(x): return __import__('sys').getsizeof(x)", ("google-research-datasets/mbpp", {"test_list": ["assert size((1, 2)) == sys.getsizeof((1, 2))"]})),
    "a function called as a builtin": ("def sum(a, b): return a + b", ("google-research-datasets/mbpp", {"test_list": ["assert sum(10, 15) == 25"]})),
    "a function called as one of the library": ("def gcd(a, b): return b if a % b == 0 else gcd(b, a % b)", asserts("assert isclose(gcd(12, 17), 1)", "assert gcd(4, 6) == 2")),
    "the prompt's helper is not repeated": ("def f(x):\n    return helper(x)", ("openai/openai_humaneval", HUMANEVAL | {"test": "def check(candidate):\n    assert candidate(1) == helper(1) == 2\n"})),
    "a future import at the top": ("from __future__ import annotations\ndef f(x: Later): return x + 1", calls("f", [1], 2)),
    "datetime": ("import datetime as d\ndef f(x): return [x + d.timedelta(days=1), d.time(1, 2, tzinfo=d.timezone.utc), d.date(2024, 2, 29)]", asserts("import datetime as d\nassert f(d.datetime(2024, 1, 1)) == [d.datetime(2024, 1, 2), d.time(1, 2, tzinfo=d.timezone.utc), d.date(2024, 2, 29)]")),
    "a datetime that nobody imports": ("def f(x): return x.replace(day=3)", asserts("assert f(datetime(2024, 1, 1)) == datetime(2024, 1, 3)")),
    "numpy": ("import numpy as np\ndef f(x): return x * np.float32(2)", asserts("import numpy as np\nr = f(np.array([1, 2]))\nassert r.shape == (2,) and np.array_equal(r, [2, 4]) and r.sum() == 6")),
    "numpy in the solution alone": ("import numpy as np\ndef f(x): return np.arange(3), np.int64(3)", asserts("assert f(1) == ([0, 1, 2], 3)")),
    "a lambda": ("f = lambda g, xs: [g(x) for x in xs]", asserts("k = 3\nassert f(lambda x: x * k, [1, 2]) == [3, 6]", "import operator\nassert f(operator.neg, [1]) == [-1]", "out = []\nf(out.append, [1, 2])\nassert out == [1, 2]")),
    "a function that is returned": ("def f(n): return lambda x: x + n", asserts("assert f(2)(3) == 5")),
    "a function that comes back": ("def f(g): return g", asserts("assert f(lambda x: x + 1)(2) == 3", "assert f(3.5) == 3.5")),
    "classes with their own methods": ("class Stack:\n  def __init__(s): s.x = []\n  def __len__(s): return len(s.x)\n  def __getitem__(s, i): return s.x[i]\n  def __setitem__(s, i, v): s.x[i] = v\n  def __bool__(s): return bool(s.x)\n  def push(s, v): s.x.append(v); return s\n  def __str__(s): return f'<{s.x}>'\n  def __call__(s): return 7", asserts("s = Stack()\nassert not s and len(s) == 0\ns.push(1).push(2).push(3)\nassert s and len(s) == 3 and s[0] == 1 and s[-1] == 3 and s[1:] == [2, 3]\ns[0] = 5\nassert list(s) == [5, 2, 3] and 5 in s and 9 not in s and str(s) == '<[5, 2, 3]>' and s() == 7\nassert isinstance(s, Stack) and s is s and s != [5, 2, 3]")),
    "objects that are compared with each other": ("class V:\n  def __init__(s, x): s.x = x\n  def __eq__(s, o): return s.x == o.x\n  def __hash__(s): return hash(s.x)\n  def __lt__(s, o): return s.x < o.x\n  def __add__(s, o): return V(s.x + o.x)\n  def __abs__(s): return abs(s.x)", asserts("assert V(1) == V(1) != V(2) and V(1) < V(2) and (V(1) + V(2)).x == 3 and abs(V(-3)) == 3", "assert len({V(1), V(1), V(2)}) == 2 and max(V(1), V(5)).x == 5")),
    "a tree": ("class Node:\n  def __init__(s, v): s.v, s.left, s.right = v, None, None\ndef depth(n): return 1 + max(depth(n.left), depth(n.right)) if n else 0", ("google-research-datasets/mbpp", {"test_setup_code": "root = Node(1)\nroot.left = Node(2)", "test_list": ["assert depth(root) == 2 and root.right is None and root.right == None"]})),
    "a generator": ("def f(n):\n  for i in range(n): yield i * i", asserts("assert list(f(3)) == [0, 1, 4] and sum(f(4)) == 14", "g = f(2)\nassert next(g) == 0 and next(g) == 1 and next(g, None) is None")),
    "named tuples and their like": ("from collections import *\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2), Counter('aab'), deque([1]), OrderedDict(a=1), range(3)", asserts("p, c, q, o, r = f()\nassert p == (1, 2) and p.y == 2 and c.most_common(1) == [('a', 2)] and q == deque([1]) and o == {'a': 1} and r == range(3)")),
    "dicts with a default": (
        "from collections import defaultdict\ndef f(g):\n  g[5].append(6)\n  return g\ndef h():\n  return defaultdict(lambda: [0], {1: 2})",
        asserts("g = defaultdict(list, {1: [2]})\nr = f(g)\nassert r == {1: [2], 5: [6]} and r[7] == []", "r = f(defaultdict(lambda: [0]))\nassert r == {5: [0, 6]} and r[9] == [0]", "r = h()\nassert r == {1: 2} and r[3] == [0]"),
    ),
    "type": ("def f(x): return type(x)", asserts("assert f(1) is int and f(None) is type(None)")),
    "infinity as a result": ("def f(x): return x", calls("f", [float("inf")], float("inf"))),
    "infinity and nan within": ("def f(x): return [-v for v in x]", calls("f", [[float("inf"), float("nan")]], [float("-inf"), float("nan")])),
    "infinity in an assert": ("def f(x): return float('inf') if x else -inf", asserts("assert f(1) == inf and f(0) == -math.inf")),
    "sorts in place": ("def f(xs): xs.sort()", asserts("xs = [3, 1]\nf(xs)\nassert xs == [1, 3]", "xs = [3, 1]\nassert f(xs) is None\nassert xs == [1, 3]", "for xs, want in [([2, 1], [1, 2]), ([], [])]:\n    f(xs)\n    assert xs == want", "def test():\n    xs = [2, 1]\n    before = xs.copy()\n    f(xs)\n    assert xs == sorted(before)\ntest()")),
    "removes in place, and returns how many": ("def f(nums, val):\n  nums[:] = [n for n in nums if n != val]\n  return len(nums)", asserts("nums = [3, 2, 2, 3]\nk = f(nums, val=3)\nassert k == 2 and sorted(nums[:k]) == [2, 2]\nassert nums == [2, 2]")),
    "leaves its argument alone": ("def f(xs): return sorted(xs)", asserts("xs = [3, 1]\nr = f(xs)\nassert r == [1, 3]\nassert xs == [3, 1]\nassert r == sorted(xs)")),
    "an exception that is asked for": ("class Bad(ValueError): pass\ndef f(x):\n  if x == 2: raise Bad('two', 2)\n  assert x, 'no'\n  return {}[x]", asserts("try: f(2)\nexcept ValueError as e: assert e.args == ('two', 2)\nelse: assert False", "try: f(0)\nexcept AssertionError as e: assert str(e) == 'no'\nelse: raise TypeError", "try: f(1)\nexcept KeyError as e: assert e.args == (1,)\nelse: assert False")),
    "tests that print": ("def f(x): return 'x' * x", asserts("print(f(100_000))\nassert f(2) == 'xx'")),
    "large numbers": ("def f(n): return 10 ** n", asserts("assert f(5000) == 10 ** 5000 and f(18) + 1 == 1000000000000000001")),
    "an exact integer": ("def f(x): return x // 1", calls("f", [123456789012], 123456789012)),
    "a float for a whole number": ("def f(x): return x / 2", calls("f", [4], 2)),
    "a float that is close": ("def f(x): return 0.1 + x", calls("f", [0.2], 0.3)),
    "a result that APPS wraps": ("def f(x): return x", calls("f", [5], [5], "apps")),
    "open('/dev/stdin')": ("import sys, pathlib\nprint(int(open('/dev/stdin').read()) + 1, file=open('/dev/stdout', 'w'))", ("codecontests", PAIRS)),
    "a path of /dev/stdin": ("from pathlib import Path\nprint(int(Path('/dev/stdin').read_text()) + 1)", ("codecontests", PAIRS)),
    "exit code 1 after the right output": ("import sys\nprint(int(input()) + 1)\nsys.exit(1)", ("codecontests", PAIRS)),
    "a message at the end": ("import sys\nprint(int(input()) + 1)\nsys.exit('done')", ("codecontests", PAIRS)),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_earn_everything(name):
    code, truth = HONEST[name]
    score = grade("it", code, {"it": truth})
    assert (score.score, score.correct, score.error) == (1.0, True, None), score


FORGERIES = {
    "compared with what it changed": ("def f(x):\n  x.clear()\n  return []", asserts("x = [3, 1]\nassert f(x) == sorted(x)", "x = [3, 1]\nr = f(x)\nassert r == sorted(x)", "x = [3, 1]\nr = f(x)\nwant = sorted(x)\nassert r == want", "x = [3, 1]\nwant = x\nassert f(x) == want", "x = want = [3, 1]\nr = f(x)\nassert r == want", "x = [3, 1]\nassert f(x=x) == x", "x = [3, 1]\nr = f(x)\nassert len(r) == len(x)", "for x in [[3, 1]]:\n    r = f(x)\n    assert all(v in r for v in x)")),
    "compared with another of its arguments": ("def f(x, y):\n  x.clear(), y.clear()", asserts("x, y = [3], [4]\nf(x, y)\nassert x == sorted(y + [3])", "x = [1, 2]\ny = [3]\nf(x, y)\nassert x == y")),
    "changed in the round before": ("def f(x):\n  r = sorted(x)\n  x[:] = [0]\n  return r if len(r) > 1 else [1]", asserts("x = [3, 1]\nfor _ in range(2):\n    want = sorted(x)\n    assert f(x) == want\n    assert x == [1, 3]")),
    "a setup's value that it changed": ("def f(x):\n  x.clear()\n  return []", ("google-research-datasets/mbpp", {"test_setup_code": "x = [3, 1]", "test_list": ["f(x)", "assert f(x) == sorted(x)"]})),
    "packages of its own": (
        "class np:\n  allclose = staticmethod(lambda *a: True)\nclass pytest:\n  approx = staticmethod(lambda x: f(x))\nclass f:\n  def __init__(s, x): pass\n  def __eq__(s, o): return True",
        asserts("assert np.allclose(f(1), 2)", "assert f(1) == pytest.approx(2)"),
    ),
    "memory of the tests that numpy is told to read": (
        "import math\nclass T(tuple): _fields = ('__array_interface__',)\ndef f(x): return T([{'version': 3, 'shape': (1,), 'typestr': '<f8', 'data': (id(math.pi) + 16, False)}])",
        asserts("import numpy as np, math\nassert np.array_equal(f(1), [math.pi])", "import numpy as np, math\nassert (f(1) == np.array([math.pi])).all()"),
    ),
    "stops a map early": ("def f(x): raise StopIteration", asserts("assert all(map(f, [1, 2]))", "assert list(map(f, [1])) == []", "assert not any(f(x) for x in [1])")),
    "an exit that swallows": ("class f:\n  def __enter__(s): return s\n  def __exit__(s, *a): return True", asserts("with f():\n    assert False")),
    "a test that catches everything": ("import os\ndef f(x): os._exit(0)", asserts("try: f(1)\nexcept BaseException: pass", "import contextlib\nwith contextlib.suppress(BaseException): f(1)")),
    "an assertion in a function of the test": ("def f(g):\n  try: g(3)\n  except BaseException: pass", asserts("def g(x): assert x == 4\nf(g)")),
    "an expectation that is handed to an operator": ("class f:\n  def __init__(s, x): pass\n  def __sub__(s, o): return o - o\n  def __eq__(s, o): return True\n  def __contains__(s, o): return True\n  def __iter__(s): return iter([])", asserts("assert abs(f(1) - 2.0) < 1e-6", "assert f(1) == 2", "assert 3 in f(1)", "assert not f(1) != 2", "assert [f(1)] == [2]", "assert f(1) in [2]", "assert {2: 1}.get(f(1)) == 1")),
    "a builtin that it does not define": ("pass", ("google-research-datasets/mbpp", {"test_list": ["assert sum([1, 2]) == 3"]})),
    "a function of the library that it does not define": ("pass", ("google-research-datasets/mbpp", {"test_list": ["assert gcd(4, 6) == 2"]})),
    "an inexact integer": ("def f(x): return 123456700000.0", calls("f", [0], 123456789012)),
    "True for 1": ("def f(x): return True", calls("f", [0], 1)),
    "an item for a list of one": ("def f(x): return x", calls("f", [5], [5])),
    "an item for a list of two in APPS": ("def f(x): return x", calls("f", [5], [5, 5], "apps")),
    "nothing for little": ("def f(x): return 0", calls("f", [0], 0.0000005)),
    "an exception after the right output": ("print(int(input()) + 1)\n1 / 0", ("codecontests", PAIRS)),
    "no Python where nothing is expected": ("def (", ("codecontests", {"inputs": ["1"], "outputs": [""]})),
    "a signal after the right output": ("import os\nprint(int(input()) + 1, flush=True)\nos.kill(os.getpid(), 15)", ("codecontests", PAIRS)),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_no_forgery_against_certain_tests_earns_anything(name):
    code, truth = FORGERIES[name]
    score = grade("it", code, {"it": truth})
    assert (score.score, score.correct, score.error) == (0.0, False, None), score


def test_a_verdict_without_the_secret_is_none():
    forged = json.dumps({"secret": "guessed", "results": [{"status": "passed", "detail": ""}]})
    (result,) = _verdict(RunResult("ok", 0, forged, "", 0.1), "secret", 1)
    assert (result.status, "not from the tests" in result.detail) == ("error", True)
    more = json.dumps({"secret": "secret", "results": [{"status": "passed", "detail": ""}] * 3})
    assert len(_verdict(RunResult("ok", 0, more, "", 0.1), "secret", 1)) == 1


@pytest.mark.parametrize(("tests", "stop"), [(1, False), (3, True)])
def test_a_solution_that_is_not_started_again_takes_one_process_beside_the_tests(tests, stop):
    sandbox = open_sandbox(SandboxConfig(processes=2))
    try:
        results = check_solution(sandbox, "def f(x): return x", ["assert f(1) == 1"] * tests, deadline_s=5.0, stop=stop)
    finally:
        sandbox.close()
    assert [result.status for result in results] == ["passed"] * tests


def test_where_nothing_can_be_forked_the_sandbox_has_failed_and_not_the_solution():
    sandbox = open_sandbox(SandboxConfig(processes=1))
    try:
        with pytest.raises(SandboxError, match="no process"):
            check_solution(sandbox, "def f(x): return x", ["assert f(1) == 1"], deadline_s=2.0)
    finally:
        sandbox.close()


def test_a_program_that_uses_up_all_processes_fails_and_the_next_one_does_not():
    code = ATTACKS["no process is left to start it"]
    with_restart = compute_score(
        "codecontests", f"```python\n{code}\n```", json.dumps(["assert f(1)"] * 3), {"time_limit_s": 0.3}
    )
    assert (with_restart.score, with_restart.error) == (0.0, None)
    assert grade("calls", "def f(x): return 2").score == 0.25
