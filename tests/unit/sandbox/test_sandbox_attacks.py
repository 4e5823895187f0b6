"""Attacks on the sandbox itself, each in a sandbox of the user that runs the tests and, for root, in an ordinary user's."""
# ruff: noqa: E501  (an attack stays on one line)

import os
import signal
import time

import pytest

from posttrain.sandbox.syscalls import SyscallFilter
from tests.helpers.sandbox_users import OthersSandbox, OwnSandbox, Unavailable
from tests.unit.sandbox.test_sandbox import REASON

pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.skipif(SyscallFilter.find() is None, reason="no seccomp filter for this kernel or architecture"),
]


def open_as(user, scratch, **config):
    try:
        return OwnSandbox(**config) if user == "own" else OthersSandbox(scratch, **config)
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=["own", "ordinary"])
def sandbox(request, tmp_path_factory):
    opened = open_as(request.param, tmp_path_factory.mktemp("stash"))
    yield opened
    opened.close()


HEAD = """
import ctypes, errno, fcntl, mmap, os, resource, signal, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
def call(function, *arguments):
    ctypes.set_errno(0)
    result = function(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result is not None and ctypes.c_long(result).value == -1: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def sys_(x86_64, aarch64, *arguments):
    return call(libc.syscall, {"x86_64": x86_64, "aarch64": aarch64}[os.uname().machine], *arguments)
buffer = ctypes.create_string_buffer(4096)
"""

REFUSED = {
    # keyrings
    "joins a session keyring": "sys_(250, 219, 1, None)",
    "reads the session keyring": "sys_(250, 219, 11, -3, buffer, 4096)",
    "reads the user's keyring": "sys_(250, 219, 11, -4, buffer, 4096)",
    "plants a key": "sys_(248, 217, b'user', b'planted', b'secret', 6, -3)",
    "plants a key of the user": "sys_(248, 217, b'user', b'planted', b'secret', 6, -4)",
    "requests a key": "sys_(249, 218, b'user', b'planted', None, -3)",
    # sockets
    "a socket to the host (vsock)": "socket.socket(40, socket.SOCK_STREAM)",
    "a socket of the kernel's crypto": "socket.socket(38, socket.SOCK_SEQPACKET)",
    "an internet socket": "socket.socket()",
    "a packet socket": "socket.socket(17, socket.SOCK_RAW)",
    "a netlink socket": "socket.socket(16, socket.SOCK_RAW)",
    "a bluetooth socket": "socket.socket(31, socket.SOCK_RAW)",
    # process 1, which may have the same user
    "limits process 1": "resource.prlimit(1, resource.RLIMIT_FSIZE, (0, 0))",
    "binds process 1 to a processor": "os.sched_setaffinity(1, {0})",
    "schedules process 1": "os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))",
    "slows process 1": "os.setpriority(os.PRIO_PROCESS, 1, 19)",
    "slows its user": "os.setpriority(os.PRIO_USER, 0, 19)",
    "slows the disk of process 1": "sys_(251, 30, 1, 1, 3 << 13)",
    "takes a descriptor of process 1": "sys_(438, 438, os.pidfd_open(1), 0, 0)",
    "reads process 1": "sys_(310, 270, 1, struct.pack('QQ', ctypes.addressof(buffer), 8), 1, struct.pack('QQ', id(None), 8), 1, 0)",
    "writes to process 1": "sys_(311, 271, 1, struct.pack('QQ', ctypes.addressof(buffer), 8), 1, struct.pack('QQ', id(None), 8), 1, 0)",
    "traces process 1": "call(libc.ptrace, 16, 1, 0, 0)",
    "lets itself be traced": "call(libc.ptrace, 0, 0, 0, 0)",
    "compares itself with process 1": "sys_(312, 272, os.getpid(), 1, 0, 0, 0)",
    "moves pages of process 1": "sys_(256, 238, 1, 8, b'\\1' * 8, b'\\1' * 8)",
    # memory that no process is charged for
    "a file in memory": "os.memfd_create('x')",
    "a secret file in memory": "sys_(447, 447, 0)",
    "a System V segment": "call(libc.shmget, 0, 1 << 20, 0o1600)",
    "System V semaphores": "call(libc.semget, 0, 1000, 0o1600)",
    "a System V queue": "call(libc.msgget, 0, 0o1600)",
    "a POSIX queue": "call(libc.mq_open, b'/q', os.O_RDWR | os.O_CREAT, 0o600, None)",
    "shared anonymous memory": "mmap.mmap(-1, 1 << 20)",
    "shared memory of /dev/zero": "mmap.mmap(os.open('/dev/zero', os.O_RDWR), 1 << 20)",
    "huge pages": "call(libc.mmap, 0, 1 << 21, 3, 0x40022, -1, 0)",
    "pages in a pipe": "sys_(278, 75, os.pipe()[1], struct.pack('QQ', ctypes.addressof(buffer), 4096), 1, 8)",
    "a file's pages in a pipe": "sys_(275, 76, os.open(sys.executable, 0), None, os.pipe()[1], None, 4096, 0)",
    "a file's pages in a pipe, by another call": "os.sendfile(os.pipe()[1], os.open(sys.executable, 0), 0, 4096)",
    "a large pipe": "fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)",
    "a large socket buffer": "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)",
    # what wakes a stopped process
    "a timer that sends SIGCONT": "call(libc.timer_create, 1, struct.pack('QiiQ', 0, 18, 0, 0) + bytes(64), buffer)",
    "a queue that sends SIGCONT": "sys_(244, 184, 0, struct.pack('QiiQ', 0, 18, 0, 0) + bytes(64))",
    "a file that sends SIGCONT": "fcntl.fcntl(os.pipe()[0], 10, signal.SIGCONT)",
    "signals of a file": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getpid())",
    "signals of a socket": "fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack('i', os.getpid()))",
    "signals of a socket, by another request": "fcntl.ioctl(socket.socketpair()[0], 0x8902, struct.pack('i', os.getpid()))",
    "signals of a folder": "fcntl.fcntl(os.open('/usr', 0), fcntl.F_NOTIFY, 1)",
    "signals of a lease": "fcntl.fcntl(os.open('f', os.O_CREAT | os.O_WRONLY), fcntl.F_SETLEASE, 1)",
    "a parent's death that sends SIGCONT": "call(libc.prctl, 1, signal.SIGCONT, 0, 0, 0)",
    "a child's death that sends SIGCONT": "sys_(56, 220, signal.SIGCONT, 0, 0, 0, 0) or os._exit(0)",
    # parts of the kernel that a program does not need
    "io_uring": "sys_(425, 425, 4, bytes(120))",
    "kernel aio": "sys_(206, 0, 4, ctypes.byref(ctypes.c_ulong()))",
    "userfaultfd": "sys_(323, 282, 1)",
    "bpf": "sys_(321, 280, 0, bytes(64), 64)",
    "perf events": "sys_(298, 241, struct.pack('II', 1, 112) + bytes(104), 0, -1, -1, 0)",
    "a new kernel": "sys_(246, 104, 0, 0, None, 0)",
    "a module": "sys_(313, 273, 0, b'', 0)",
    "the kernel's log": "sys_(103, 116, 3, buffer, 4096)",
    "a mount": "call(libc.mount, b't', b'/sandbox', b'tmpfs', 0, b'')",
    "the mount interface": "sys_(430, 430, b'tmpfs', 0)",
    "a copy of a mount": "sys_(428, 428, -100, b'/usr', 1)",
    "a user namespace": "call(libc.unshare, 0x10000000)",
    "a user namespace of a child": "sys_(56, 220, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0) or os._exit(0)",
    "a child by clone3": "sys_(435, 435, struct.pack('8Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0), 64) or os._exit(0)",
    "a sibling whose parent is process 1": "sys_(56, 220, 0x8000 | signal.SIGCHLD, 0, 0, 0, 0) or os._exit(0)",
    "another's namespace": "sys_(308, 268, os.pidfd_open(1), 0x20000)",
    "a new root": "os.mkdir('r') or os.chroot('r')",
    "another personality": "sys_(135, 92, 0x40000)",
    "a handle of a file": "sys_(303, 264, -100, b'/usr', struct.pack('Ii', 128, 0) + bytes(128), buffer, 0)",
    "a watch on the host's files": "call(libc.inotify_init1, 0)",
    "a watch on all files": "sys_(300, 262, 0, 0)",
    "a filter of its own": "call(libc.prctl, 22, 2, struct.pack('HQ', 1, 0), 0, 0)",
    "strict mode": "call(libc.prctl, 22, 1, 0, 0, 0)",
    "its memory's layout": "call(libc.prctl, 35, 1, 0, 0, 0)",
    "an x32 call": "sys_(0x40000000 + 39, 1 << 20)",
    "higher limits": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "another clock": "time.clock_settime(0, 0)",
    "another host name": "socket.sethostname('x')",
    "a device": "os.mknod('d', 0o020600, os.makedev(1, 1))",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_the_kernel_refuses(sandbox, name):
    attack = f"try: {REFUSED[name]}\nexcept (OSError, ValueError) as e: print('refused', errno.errorcode.get(e.errno) if isinstance(e, OSError) else e)\nelse: print('it worked')"
    result = sandbox.run(f"{HEAD}\nimport time\n{attack}")
    assert result.stdout.startswith("refused"), result
    # A kernel that lacks the call proves nothing, but an argument that it cannot read would be the test's own fault.
    assert not {"EFAULT", "EINVAL", "EBADF"} & set(result.stdout.split()), result


def test_a_call_of_another_architecture_ends_the_program(sandbox):
    """int 0x80 takes the numbers of 32-bit programs, which the filter does not know."""
    if os.uname().machine != "x86_64":
        pytest.skip("machine code of x86_64")
    code = "\xb8\x14\x00\x00\x00\xcd\x80\xc3"  # mov eax, 20 (getpid); int 0x80; ret
    attack = (
        f"m = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7); m.write({code.encode('latin1')!r})\n"
        "print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))())"
    )
    result = sandbox.run(HEAD + attack)
    assert (result.stdout, result.exit_code) == ("", -signal.SIGSYS)


LEAVES = {
    "a folder that is closed": "os.chmod('.', 0)",
    "a time in the future": "os.utime('.', (2 ** 32, 2 ** 32))",
    "files": "open('left', 'w').write('x' * 9999)",
    "many folders": "[os.mkdir(str(i)) for i in range(8000)]",
    "a limit of process 1": "resource.prlimit(1, resource.RLIMIT_FSIZE, (0, 0))",
    "limits of its own": "[resource.setrlimit(k, (0, 0)) for k in (resource.RLIMIT_FSIZE, resource.RLIMIT_CPU)]",
    "a low priority": "os.nice(19)",
    "no descriptors for its parent": "[os.pidfd_open(1) for _ in range(500)]",
    "a wait for its parent": "os.kill(1, signal.SIGSTOP)",
    "signals that are blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))",
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_program_leaves_the_slot_as_it_was(sandbox, name):
    look = (
        "import os, resource as r, time\n"
        "open('new', 'w').write('x' * 100_000)\n"
        "s = os.stat('.')\n"
        "print(os.listdir('.'), oct(s.st_mode), s.st_mtime < 2 ** 32, os.nice(0), len(os.sched_getaffinity(0)))\n"
        "print([r.getrlimit(k) for k in (r.RLIMIT_FSIZE, r.RLIMIT_AS, r.RLIMIT_NOFILE)])"
    )
    before = sandbox.run(look)
    assert before.exit_code == 0
    sandbox.run(f"{HEAD}\n{LEAVES[name]}")
    assert sandbox.run(look).stdout == before.stdout


def test_the_memory_of_files_and_descriptors_counts(tmp_path):
    """What is in no process's resident set is memory as well; and what processes share counts once."""
    sandbox = OwnSandbox(memory_mb=300, disk_mb=150, file_mb=150)
    touch = "import os, time\nfirst = bytearray(b'x') * 100_000_000\n"
    try:
        forked = "for _ in range(4):\n  if os.fork() == 0: sum(first[::4096]); time.sleep(0.5); os._exit(0)\nfor _ in range(4): os.wait()"
        shared = sandbox.run(touch + forked, deadline_s=30.0)
        assert (shared.status, shared.stderr) == ("ok", "")
        private = "for _ in range(4):\n  if os.fork() == 0: own = bytearray(b'y') * 100_000_000; time.sleep(60)\ntime.sleep(60)"
        assert sandbox.run(touch + private, deadline_s=60.0).status == "memory"
        files = "second = bytearray(b'x') * 80_000_000\nwith open('f', 'wb') as f: f.write(first); f.write(first[:40_000_000])\ntime.sleep(60)"
        assert sandbox.run(touch + files, deadline_s=60.0).status == "memory"
        opened = "import os, time\nfor _ in range(12):\n  if os.fork() == 0:\n    kept = [os.pipe() for _ in range(100)]\n    time.sleep(60)\ntime.sleep(60)"
        assert sandbox.run(opened, deadline_s=60.0).status == "memory"
    finally:
        sandbox.close()


STAMPS = (
    "import ctypes, os, signal, sys, time\n"
    "def stamp(name):\n"
    "    with open(name, 'w', 1) as file:\n"
    "        while True: file.write(f'{time.monotonic()}\\n'); time.sleep(0.01)\n"
    "def started(name):\n"
    "    while not os.path.exists(name) or not os.path.getsize(name): time.sleep(0.001)\n"
)
GOES_ON = {
    "a process": "if os.fork() == 0: stamp('s')\nstarted('s')",
    "a thread": "import threading\nthreading.Thread(target=stamp, args=('s',), daemon=True).start()\nstarted('s')",
    "a process of its own session": "if os.fork() == 0:\n  os.setsid()\n  stamp('s')\nstarted('s')",
    "one whose group is orphaned": (  # by a parent whose end takes longer than the cell's: it has much memory to give back
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nr, w = os.pipe()\n"
        "if os.fork() == 0:\n"
        "  os.setsid()\n"
        "  if os.fork() == 0:\n    os.setpgid(0, 0); stamp('s')\n"
        "  held = bytearray(b'x') * 800_000_000; started('s'); os.write(w, b'x'); os._exit(0)\n"
        "os.read(r, 1) and None"
    ),
    "one whose alarm rings": "signal.signal(signal.SIGALRM, lambda *_: None)\nif os.fork() == 0:\n  signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01); stamp('s')\nstarted('s')",
}


@pytest.mark.parametrize("name", GOES_ON)
def test_nothing_computes_between_cells(sandbox, name):
    sandbox.run("pass")  # closes the session before
    began = sandbox.cell(STAMPS + GOES_ON[name], deadline_s=20.0)
    assert (began.status, began.stderr) == ("ok", "")
    time.sleep(1.0)
    stamps = "times = [*map(float, open('s')), time.monotonic()]\nmax(b - a for a, b in zip(times, times[1:]))"
    assert float(sandbox.cell(stamps).stdout) > 0.8  # while nothing ran, although the test waited


HONEST = {
    "threads": "from concurrent.futures import ThreadPoolExecutor as P\nwith P(4) as p: print(sum(p.map(abs, range(-3, 1))))",
    "as many threads as a pool has on a large machine": "import threading as t\nfrom concurrent.futures import ThreadPoolExecutor as P\nb = t.Barrier(32)\nwith P(32) as p: print(len(list(p.map(lambda _: b.wait(), range(32)))) - 26)",
    "processes": "from concurrent.futures import ProcessPoolExecutor as P\nwith P(2) as p: print(sum(p.map(abs, range(-3, 1))))",
    "processes that run the program's file": "import multiprocessing as m\ndef f(x): return x * x\nif __name__ == '__main__':\n  with m.get_context('spawn').Pool(1) as p, m.get_context('forkserver').Pool(1) as q: print(sum(p.map(f, [1, 1]) + q.map(f, [2])))",
    "a queue": "import multiprocessing as m\nm.set_start_method('fork')\nq = m.Queue(); p = m.Process(target=q.put, args=(6,)); p.start(); print(q.get()); p.join()",
    "a manager": "import multiprocessing as m\nwith m.Manager() as s: l = s.list([1, 2, 3]); print(sum(l))",
    "shared values": "import multiprocessing as m\na = m.Array('i', 3); p = m.get_context('fork').Process(target=a.__setitem__, args=(1, 6)); p.start(); p.join(); print(a[1])",
    "shared memory": "from multiprocessing.shared_memory import SharedMemory as S\ns = S(create=True, size=9); t = S(s.name); s.buf[0] = 6; print(t.buf[0]); s.unlink()",
    "a shell": "import subprocess; print(subprocess.run('echo 12 345 | tr -d \" \" | wc -c; exit 2', shell=True, capture_output=True, text=True).stdout)",
    "asyncio": "import asyncio\nasync def f(): await asyncio.sleep(0.01); return 6\nprint(asyncio.run(f()))",
    "an asyncio process": "import asyncio\nasync def f(): p = await asyncio.create_subprocess_exec('echo', '6', stdout=-1); return (await p.communicate())[0]\nprint(int(asyncio.run(f())))",
    "a data base": "import sqlite3\nc = sqlite3.connect('d.db'); c.execute('create table t (a)'); c.execute('insert into t values (6)'); c.commit(); print(*c.execute('select a from t').fetchone())",
    "copies of files": "import shutil, sys\nfor f in (shutil.copy, shutil.copy2, shutil.copyfile, shutil.move): open('a', 'w').write('6'); f('a', 'b')\nprint(open('b').read())",
    "a copy of a tree": "import os, shutil\nos.makedirs('a/b'); open('a/b/c', 'w').write('6'); shutil.copytree('a', 'd'); print(open('d/b/c').read())",
    "a mapped input": "import mmap\nprint(int(mmap.mmap(0, 0, access=mmap.ACCESS_READ).readline()))",
    "numpy": "import numpy as np\na = np.eye(300); print(int(np.linalg.matrix_rank(a @ a) / 50))",
    "an alarm": "import signal\nsignal.signal(signal.SIGALRM, lambda *_: print(6)); signal.setitimer(signal.ITIMER_REAL, 0.01); signal.pause()",
    "a selector": "import selectors, socket\na, b = socket.socketpair(); s = selectors.DefaultSelector(); s.register(a, 1); b.send(b'6'); s.select(); print(a.recv(1).decode())",
    "a fifo": "import os\nos.mkfifo('f')\nif os.fork() == 0: open('f', 'w').write('6'); os._exit(0)\nprint(open('f').read())",
    "a lock": "import fcntl\nf = open('l', 'w'); fcntl.lockf(f, fcntl.LOCK_EX); fcntl.flock(f, fcntl.LOCK_EX); print(6)",
    "its own limits": "import os, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (99, 99)); os.nice(1); os.sched_setaffinity(0, os.sched_getaffinity(0)); print(6)",
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_run(sandbox, name):
    result = sandbox.run(HONEST[name], "6\n")
    assert (result.stdout.strip(), result.exit_code) == ("6", 0), result
