"""Linux namespaces and capabilities, through libc. Stdlib only: the zygote imports this file by its path.

What a program in the sandbox is given: a root file system of read-only binds (the system's libraries and the Python
that runs it), a private tmpfs as the only writable folder, a network without interfaces, a process tree of its own, no
keyring of anybody, no capability, and a user id that owns nothing. ``user_namespaces(7)``, ``pivot_root(2)``,
``capabilities(7)``, ``keyrings(7)``. ``syscalls.py`` has the filter of system calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys

WORK = "/sandbox"
"""The private folder, inside."""
_TEMPORARY = ("/tmp", "/dev/shm")
"""Links to it; where Python itself lies below one, that one is a private folder of its own."""
_BELOW = "/.below"
"""Here lies what is shown below a private folder, to be bound there whenever that is replaced."""
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
_SYS_KEYCTL = 250 if os.uname().machine == "x86_64" else 219
_KEYCTL_JOIN_SESSION_KEYRING = 1
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_PR_SET_CHILD_SUBREAPER, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 36, 47, 2
_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITIES = range(64)
"""More than any kernel has."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("null", "full", "random", "urandom")  # a shared mapping of zero is memory that nobody is charged for

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


def leave_keyrings() -> None:
    """Enter an empty session keyring, which links to none of the user's, as the one before may do."""
    if _libc.syscall(_SYS_KEYCTL, _KEYCTL_JOIN_SESSION_KEYRING, None) < 0:
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.EPERM):  # whoever may not ask here may not ask inside either
            raise IsolationError(number, f"a new session keyring: {os.strerror(number)}")


def keep_capabilities() -> None:
    """Keep the capabilities in this namespace when another program is executed, although its user is not root."""
    header, sets = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    _call("capget", _libc.capget(header, sets))
    sets[2], sets[5] = sets[1], sets[4]  # inheritable: what is permitted, in two halves
    _call("capset", _libc.capset(header, sets))
    for capability in _CAPABILITIES:
        if _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability, 0, 0) != 0:
            break


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


def build_root() -> tuple[list[str], int | None]:
    """Replace the root file system of this mount namespace.

    Returns the read-only folders that must be shown below private ones (for ``PrivateFolders``), and an open /proc of
    this process namespace, or None where the kernel refuses one (a container that masks its own).
    """
    _call("mount private", _libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    _forbid_nested_namespaces()
    _mount_tmpfs(_STAGE, "size=1m,mode=755")
    os.mkdir(f"{_STAGE}/old")
    _call("pivot_root", _libc.syscall(_SYS_PIVOT_ROOT, _STAGE.encode(), f"{_STAGE}/old".encode()))
    os.chdir("/")
    python = _python_folders()
    below = [path for path in python if any(_lies_below(path, folder) for folder in (WORK, *_TEMPORARY))]
    for path in [*_SYSTEM, *python]:
        _bind(f"/old{path}", f"{_BELOW}{path}" if path in below else path)
    for name in _DEVICES:
        _bind(f"/old/dev/{name}", f"/dev/{name}", readonly=False)
    with open("/etc/passwd", "w") as file:
        file.write(f"sandbox:x:{JOB_ID}:{JOB_ID}::{WORK}:/bin/sh\n")
    proc = _open_proc()
    _call("umount old root", _libc.umount2(b"/old", _MNT_DETACH))
    os.rmdir("/old")
    os.mkdir(WORK)
    for folder in _TEMPORARY:
        if any(_lies_below(path, folder) for path in below):
            os.makedirs(folder)
        else:
            os.symlink(WORK, folder)
    _set_readonly("/", recursive=False)
    return below, proc


class PrivateFolders:
    """The folders that a program can write to, on file systems of their own.

    Args:
        disk_bytes: what each file system holds.
        below: read-only folders to be shown in them, as ``build_root`` returned them.
    """

    def __init__(self, disk_bytes: int, below: list[str]) -> None:
        self._options = f"size={disk_bytes},nr_inodes=8192,mode=700,uid={JOB_ID},gid={JOB_ID}"
        self._below = below
        self._mounted = [WORK, *(f for f in _TEMPORARY if any(_lies_below(path, f) for path in below))]
        self._mount()

    def renew(self) -> None:
        """Throw away what a program left. No process may be left in them."""
        if self._below or os.listdir(WORK) or self._fresh != _identity(WORK):
            for folder in self._mounted:
                _call("umount", _libc.umount2(folder.encode(), _MNT_DETACH))
            self._mount()

    def used(self) -> int:
        """Bytes of memory that their files hold."""
        found = [os.statvfs(folder) for folder in self._mounted]
        return sum((stat.f_blocks - stat.f_bfree) * stat.f_frsize for stat in found)

    def _mount(self) -> None:
        for folder in self._mounted:
            _mount_tmpfs(folder, self._options)
        for path in self._below:
            _bind(f"{_BELOW}{path}", path)
        self._fresh = _identity(WORK)


def _identity(folder: str) -> tuple[int, ...]:
    """What changes with everything that a program does to a folder itself."""
    stat = os.stat(folder)
    return stat.st_mode, stat.st_uid, stat.st_gid, stat.st_mtime_ns, stat.st_ctime_ns


def _lies_below(path: str, folder: str) -> bool:
    return path.startswith(f"{folder}/")


def new_ipc() -> None:
    """Leave whatever System V and POSIX queues and segments the last program made."""
    _call("unshare IPC", _libc.unshare(_NEWIPC))


def drop_privileges(*, isolated: bool) -> None:
    """Become a user without capabilities, for good. Nobody can attach a debugger to this process."""
    if isolated:
        with contextlib.suppress(PermissionError):  # an ordinary user may not change its groups in a namespace
            os.setgroups([])
        for capability in _CAPABILITIES:
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


def _bind(source: str, path: str, *, readonly: bool = True) -> None:
    """Show ``source`` at ``path``; a symlink becomes the same symlink, and what is missing stays so."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(source):
        if not os.path.lexists(path):
            os.symlink(os.readlink(source), path)
        return
    if not os.path.exists(source):
        return
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        with open(path, "w"):
            pass
    _call(f"bind {path}", _libc.mount(source.encode(), path.encode(), None, _MS_BIND | _MS_REC, None))
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
