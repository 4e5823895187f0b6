"""Linux namespaces and capabilities, through libc. Stdlib only: the zygote imports this file by its path.

What a program in the sandbox is given: a root file system of read-only binds (the system's libraries and the Python
that runs it), a private tmpfs as the only writable folder, a network without interfaces, a process tree of its own, no
capability, and a user id that owns nothing. ``user_namespaces(7)``, ``pivot_root(2)``, ``capabilities(7)``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

WORK = "/sandbox"
"""The private folder, inside; /tmp is a link to it."""
_STAGE = "/tmp"
"""Any folder of the old root: the new one is mounted there before it becomes the root."""
JOB_ID = 1000
"""User and group of programs, inside."""
OUTER_ID = 65534
"""``nobody``: whom ``JOB_ID`` is outside when we are root. The kernel exempts real root from RLIMIT_NPROC."""

_NEWNS, _NEWUTS, _NEWIPC = 0x00020000, 0x04000000, 0x08000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID = 1, 2
_SYS_MOUNT_SETATTR = 442  # the same number on every architecture; Linux 5.12
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(os.uname().machine)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_PR_SET_CHILD_SUBREAPER = 36
_CAPABILITY_VERSION_3 = 0x20080522
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("null", "zero", "full", "random", "urandom")

_libc = ctypes.CDLL(None, use_errno=True)


class IsolationError(OSError):
    """The kernel refused a step of the isolation; the message names it."""


class _Attr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def _call(what: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise IsolationError(number, f"{what}: {os.strerror(number)}")


def unshare() -> None:
    """Enter new user, network, mount, IPC, UTS and (for the next child) process namespaces."""
    flags = _NEWUSER | _NEWNET | _NEWNS | _NEWIPC | _NEWUTS | _NEWPID
    _call("unshare", _libc.unshare(flags))


def map_ids(pid: int) -> None:
    """Write the id maps of a process that entered a user namespace. Run by its parent, outside."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        if uid == 0:
            with contextlib.suppress(OSError):  # an outer namespace without a `nobody`: then as an ordinary user
                _write(f"/proc/{pid}/uid_map", f"0 0 1\n{JOB_ID} {OUTER_ID} 1\n")
                _write(f"/proc/{pid}/gid_map", f"0 0 1\n{JOB_ID} {OUTER_ID} 1\n")
                return
        _write(f"/proc/{pid}/setgroups", "deny")
        _write(f"/proc/{pid}/uid_map", f"{JOB_ID} {uid} 1\n")
        _write(f"/proc/{pid}/gid_map", f"{JOB_ID} {gid} 1\n")
    except OSError as error:
        raise IsolationError(error.errno, f"writing the id maps: {error.strerror}") from error


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())  # the kernel takes a map in one write
    finally:
        os.close(fd)


def build_root(disk_bytes: int) -> int | None:
    """Replace the root file system of this mount namespace. Returns an open /proc of this process namespace, or None
    where the kernel refuses one (a container that masks its own)."""
    _call("mount private", _libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    _forbid_nested_namespaces()
    _mount_tmpfs(_STAGE, "size=1m,mode=755")
    os.mkdir(f"{_STAGE}/old")
    _call("pivot_root", _libc.syscall(_SYS_PIVOT_ROOT, _STAGE.encode(), f"{_STAGE}/old".encode()))
    os.chdir("/")
    for path in [*_SYSTEM, *_python_folders()]:
        _bind(path)
    for name in _DEVICES:
        _bind(f"/dev/{name}", readonly=False)
    with open("/etc/passwd", "w") as file:
        file.write(f"sandbox:x:{JOB_ID}:{JOB_ID}::{WORK}:/bin/sh\n")
    proc = _open_proc()
    _call("umount old root", _libc.umount2(b"/old", _MNT_DETACH))
    os.rmdir("/old")
    os.mkdir(WORK)
    for link in ("/tmp", "/dev/shm"):
        if not os.path.lexists(link):
            os.symlink(WORK, link)
    _set_readonly("/", recursive=False)
    fresh_work(disk_bytes)
    return proc


def fresh_work(disk_bytes: int) -> None:
    """An empty private folder, on a file system of its own that holds ``disk_bytes``."""
    _mount_tmpfs(WORK, f"size={disk_bytes},nr_inodes=8192,mode=700,uid={JOB_ID},gid={JOB_ID}")


def drop_work() -> None:
    """Throw the private folder away. No process may be left in it."""
    _call("umount", _libc.umount2(WORK.encode(), _MNT_DETACH))


def new_ipc() -> None:
    """Leave whatever System V and POSIX queues and segments the last program made."""
    _call("unshare IPC", _libc.unshare(_NEWIPC))


def drop_privileges(*, isolated: bool) -> None:
    """Become a user without capabilities, for good. Nobody can attach a debugger to this process."""
    if isolated:
        with contextlib.suppress(PermissionError):  # an ordinary user may not change its groups in a namespace
            os.setgroups([])
        for capability in range(64):
            if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
                break
        os.setresgid(JOB_ID, JOB_ID, JOB_ID)
        os.setresuid(JOB_ID, JOB_ID, JOB_ID)
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
        _call("capset", _libc.capset(header, (ctypes.c_uint32 * 6)()))
    _call("no_new_privs", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    forbid_tracing()


def forbid_tracing() -> None:
    """Programs of the same user cannot read or write this process's memory, or take its file descriptors."""
    _call("dumpable", _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))


def die_with_parent() -> None:
    _call("pdeathsig", _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def adopt_orphans() -> None:
    _call("subreaper", _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def _python_folders() -> list[str]:
    """Folders of this interpreter and its packages; they may lie in a home folder, of which nothing else shows."""
    prefixes = (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)
    found = {*prefixes, *map(os.path.realpath, prefixes), os.path.dirname(os.path.realpath(sys.executable))}
    outer = [*(folder for folder in found if folder != "/"), "/usr"]
    return sorted(p for p in outer if p != "/usr" and not any(p.startswith(f"{other}/") for other in outer))


def _bind(path: str, *, readonly: bool = True) -> None:
    """Show ``path`` of the old root at the same place; a symlink becomes the same symlink."""
    old = f"/old{path}"
    if os.path.islink(old):
        if not os.path.lexists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(os.readlink(old), path)
        return
    if not os.path.exists(old):
        return
    if os.path.isdir(old):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w"):
            pass
    _call(f"bind {path}", _libc.mount(old.encode(), path.encode(), None, _MS_BIND | _MS_REC, None))
    if readonly:
        _set_readonly(path, recursive=True)


def _set_readonly(path: str, *, recursive: bool) -> None:
    attr = _Attr(_ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    result = _libc.syscall(
        _SYS_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, ctypes.byref(attr), ctypes.c_size_t(ctypes.sizeof(attr))
    )
    _call(f"mount_setattr {path} (Linux 5.12)", result)


def _mount_tmpfs(path: str, options: str) -> None:
    flags = _MS_NOSUID | _MS_NODEV
    _call(f"tmpfs on {path}", _libc.mount(b"tmpfs", path.encode(), b"tmpfs", flags, options.encode()))


def _open_proc() -> int | None:
    """A /proc that only the holder of this descriptor sees: it is nowhere in the tree."""
    os.mkdir("/proc")
    if _libc.mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None) != 0:
        return None
    fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    _call("umount proc", _libc.umount2(b"/proc", _MNT_DETACH))
    return fd


def _forbid_nested_namespaces() -> None:
    """Without user namespaces of its own a program cannot regain capabilities. Best effort: /proc/sys may be masked,
    and such capabilities would not reach beyond this namespace anyway."""
    with contextlib.suppress(OSError):
        _write("/proc/sys/user/max_user_namespaces", "0")
