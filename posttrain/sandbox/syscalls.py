"""The system calls that a program in the sandbox may make, as a seccomp filter. Stdlib only: the zygote imports this
file by its path.

The filter lists what is allowed. What it does not list answers ENOSYS, as a kernel that lacks the call does: the C
library then takes the call's older sibling (``clone`` for ``clone3``), and a call that a future kernel brings is closed
from its first day. Some calls are allowed with certain arguments only, each for the reason that stands beside it.
``seccomp(2)``, ``linux/filter.h``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import sys
from dataclasses import dataclass

_ALLOWED = """
    read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70,
    preadv2 327 286, pwritev2 328 287, lseek 8 62, open 2 -, openat 257 56, creat 85 -, close 3 57,
    close_range 436 436, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, access 21 -,
    faccessat 269 48, faccessat2 439 439, statfs 137 43, fstatfs 138 44, getdents 78 -, getdents64 217 61,
    readlink 89 -, readlinkat 267 78, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, flock 73 32,
    fsync 74 82, fdatasync 75 83, fadvise64 221 223, truncate 76 45, ftruncate 77 46, fallocate 285 47,
    umask 95 166, getcwd 79 17, chdir 80 49, fchdir 81 50, mkdir 83 -, mkdirat 258 34, rmdir 84 -, rename 82 -,
    renameat 264 38, renameat2 316 276, link 86 -, linkat 265 37, unlink 87 -, unlinkat 263 35, symlink 88 -,
    symlinkat 266 36, mknod 133 -, mknodat 259 33, chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452,
    chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, utime 132 -, utimes 235 -, futimesat 261 -,
    utimensat 280 88, getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12,
    flistxattr 196 13, munmap 11 215, mprotect 10 226, mremap 25 216, madvise 28 233, brk 12 214, msync 26 227,
    mlock 149 228, mlock2 325 284, munlock 150 229, mlockall 151 230, munlockall 152 231, membarrier 324 283,
    fork 57 -, vfork 58 -, execve 59 221, exit 60 93, exit_group 231 94, wait4 61 260, waitid 247 95,
    arch_prctl 158 -, set_tid_address 218 96, set_robust_list 273 99, get_robust_list 274 100, rseq 334 293,
    futex 202 98, sched_yield 24 124, sched_getaffinity 204 123, sched_getparam 143 121,
    sched_getscheduler 145 120, sched_get_priority_max 146 125, sched_get_priority_min 147 126,
    sched_rr_get_interval 148 127, getpriority 140 141, getrlimit 97 163, setrlimit 160 164, getrusage 98 165,
    times 100 153, sysinfo 99 179, uname 63 160, getcpu 309 168, getrandom 318 278, getpid 39 172, getppid 110 173,
    gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148,
    getresgid 120 150, getgroups 115 158, getpgid 121 155, getpgrp 111 -, getsid 124 156, setsid 112 157,
    setpgid 109 154, setuid 105 146, setgid 106 144, setreuid 113 145, setregid 114 143, setresuid 117 147,
    setresgid 119 149, capget 125 90, kill 62 129, tkill 200 130, tgkill 234 131, rt_sigaction 13 134,
    rt_sigprocmask 14 135, rt_sigpending 127 136, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240,
    rt_sigsuspend 130 133, rt_sigtimedwait 128 137, rt_sigreturn 15 139, sigaltstack 131 132, pause 34 -,
    alarm 37 -, setitimer 38 103, getitimer 36 102, restart_syscall 219 128, pidfd_open 434 434,
    pidfd_send_signal 424 424, nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113,
    clock_getres 229 114, gettimeofday 96 169, time 201 -, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72,
    epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22,
    epoll_pwait2 441 441, eventfd 284 -, eventfd2 290 19, bind 49 200, listen 50 201, accept 43 202,
    accept4 288 242, connect 42 203, getsockname 51 204, getpeername 52 205, sendto 44 206, recvfrom 45 207,
    sendmsg 46 211, recvmsg 47 212, sendmmsg 307 269, recvmmsg 299 243, shutdown 48 210, getsockopt 55 209
"""
"""Name, number on x86_64, number on aarch64; a dash where the architecture lacks it. What is missing from the list:
other namespaces, mounts, tracing and other processes' memory, keyrings, io_uring and kernel aio, bpf, perf events,
userfaultfd, watches on files (inotify, fanotify), handles of files, swap and modules; calls that hold memory which no
process is charged for (memfd_create, System V and POSIX queues and segments, vmsplice, splice, sendfile); and
timer_create and mq_notify, which can send SIGCONT to a process that was stopped."""

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the tables, and the architecture as the kernel's audit interface calls it."""
_ANY = 0xFFFFFFFF
_CLONE_ALLOWED = 0x01 | 0x10 | 0x100 | 0x200 | 0x400 | 0x800 | 0x4000 | 0x10000 | 0x40000 | 0x80000
_CLONE_ALLOWED |= 0x100000 | 0x200000 | 0x400000 | 0x1000000 | 0x1000
"""SIGCHLD's bits, and VM, FS, FILES, SIGHAND, VFORK, THREAD, SYSVSEM, SETTLS and the four about thread ids; PIDFD."""
_FCNTL_ALLOWED = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032, 1034)
"""Duplicates, flags and locks; the size of a pipe and the seals of a file can be read."""
_IOCTL_ALLOWED = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS (isatty), TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_PRCTL_ALLOWED = (3, 4, 15, 16, 21, 23, 29, 30, 38, 39, 41, 42, 0x53564D41)
"""Dumpable, the thread's name, whether there is a filter, the bounding set (read), timer slack, no_new_privs, huge
pages off, names of mappings."""


@dataclass(frozen=True)
class _Rule:
    """A call that is allowed where every condition holds, and otherwise fails with ``error``. A condition is
    (argument, mask, values, whether ``argument & mask`` must be one of them)."""

    numbers: tuple[int, int]
    error: int
    conditions: tuple[tuple[int, int, tuple[int, ...], bool], ...]


_RULES = (
    # Only Unix sockets: the network namespace has no part in AF_VSOCK, AF_ALG and others.
    _Rule((41, 198), errno.EAFNOSUPPORT, ((0, _ANY, (socket.AF_UNIX,), True),)),  # socket
    _Rule((53, 199), errno.EAFNOSUPPORT, ((0, _ANY, (socket.AF_UNIX,), True),)),  # socketpair
    # Larger buffers are kernel memory that nobody is charged for (SO_SNDBUF, SO_RCVBUF).
    _Rule((54, 208), errno.EPERM, ((2, _ANY, (7, 8, 32, 33), False),)),  # setsockopt
    # Signals of files, which may be SIGCONT, when others touch them (F_SETOWN, F_SETSIG, F_NOTIFY, F_SETLEASE, and the
    # same as requests of ioctl); larger pipes; seals on our own files.
    _Rule((72, 25), errno.EPERM, ((1, _ANY, _FCNTL_ALLOWED, True),)),  # fcntl
    _Rule((16, 29), errno.ENOTTY, ((1, _ANY, _IOCTL_ALLOWED, True),)),  # ioctl
    # MAP_HUGETLB takes pages that no limit counts, and shared anonymous memory stays when all unmap it but for a page.
    _Rule((9, 222), errno.EPERM, ((3, 0x40000, (0,), True), (3, 0x21, (0x21,), False))),  # mmap
    # No namespaces, no process whose parent is ours, and no other signal than SIGCHLD to the parent.
    _Rule((56, 220), errno.EPERM, ((0, _ANY & ~_CLONE_ALLOWED, (0,), True),)),  # clone
    # PR_SET_PDEATHSIG may be SIGCONT; no further filters, no subreaper.
    _Rule((157, 167), errno.EPERM, ((0, _ANY, _PRCTL_ALLOWED, True),)),  # prctl
    # A program's own limits, processors and priority: process 1 of the slot may have the same user.
    _Rule((302, 261), errno.EPERM, ((0, _ANY, (0,), True),)),  # prlimit64
    _Rule((203, 122), errno.EPERM, ((0, _ANY, (0,), True),)),  # sched_setaffinity
    _Rule((141, 140), errno.EPERM, ((0, _ANY, (0,), True), (1, _ANY, (0,), True))),  # setpriority
    # As a file system without extended attributes answers, which is what copies of files expect.
    _Rule((188, 5), errno.ENOTSUP, ((0, 0, (1,), True),)),  # setxattr
    _Rule((189, 6), errno.ENOTSUP, ((0, 0, (1,), True),)),  # lsetxattr
    _Rule((190, 7), errno.ENOTSUP, ((0, 0, (1,), True),)),  # fsetxattr
)

_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_LOAD, _EQUAL, _AT_LEAST, _ABOVE, _AND, _RETURN = 0x20, 0x15, 0x35, 0x25, 0x54, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in ``struct seccomp_data``."""
_PR_SET_SECCOMP, _MODE_FILTER, _GET_ACTION_AVAIL = 22, 2, 2
_SYS_SECCOMP = (317, 277)

_libc = ctypes.CDLL(None, use_errno=True)  # once, and not in each program

_Instruction = tuple[int, int, int, int]
"""Operation, jump if true, jump if false (both relative), constant."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


class SyscallFilter:
    """The filter, assembled for this machine. ``find`` makes one."""

    def __init__(self, column: int, architecture: int) -> None:
        code = b"".join(struct.pack("<HBBI", *step) for step in _assemble(column, architecture))
        self._code = ctypes.create_string_buffer(code, len(code))
        self._program = _Program(len(code) // 8, ctypes.addressof(self._code))

    @classmethod
    def find(cls) -> SyscallFilter | None:
        """Return the filter for this machine; None where its kernel or architecture has none."""
        machine = _MACHINES.get(os.uname().machine)
        if machine is None or sys.maxsize < 2**32:
            return None
        column, architecture = machine
        action = ctypes.c_uint32(_ERRNO)
        number = ctypes.c_long(_SYS_SECCOMP[column])
        if _libc.syscall(number, _GET_ACTION_AVAIL, 0, ctypes.byref(action)) != 0:
            return None
        return cls(column, architecture)

    def install(self) -> None:
        """Confine this process, and all that it starts, for good. It must have set no_new_privs.

        Raises:
            OSError: the kernel refused it.
        """
        if _libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(self._program), 0, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"seccomp: {os.strerror(number)}")


def _assemble(column: int, architecture: int) -> list[_Instruction]:
    # 32-bit calls have another architecture; those of x32 have numbers that are in no range.
    steps = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL)]
    steps.append((_LOAD, 0, 0, _NUMBER))
    for rule in _RULES:
        body = _rule_steps(rule)
        steps += [(_EQUAL, 0, len(body), rule.numbers[column]), *body]
    return steps + _search_steps(_ranges(column))


def _rule_steps(rule: _Rule) -> list[_Instruction]:
    """Only the low half of an argument counts: the kernel takes these as 32-bit numbers or as flags below 2^32."""
    steps: list[_Instruction] = []
    refuse = (_RETURN, 0, 0, _ERRNO | rule.error)
    for argument, mask, values, wanted in rule.conditions:
        steps += [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), (_AND, 0, 0, mask)]
        left = len(values)
        for value in values:  # a match jumps behind the others: to the refusal, or beyond it
            left -= 1
            steps.append((_EQUAL, left + (1 if wanted else 0), 0 if left or wanted else 1, value))
        steps.append(refuse)
    return [*steps, (_RETURN, 0, 0, _ALLOW)]


def _search_steps(ranges: list[tuple[int, int]]) -> list[_Instruction]:
    """A binary search: the kernel runs the filter for every number when it is installed."""
    if len(ranges) == 1:
        first, last = ranges[0]
        refuse = (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)
        return [(_AT_LEAST, 0, 1, first), (_ABOVE, 0, 1, last), refuse, (_RETURN, 0, 0, _ALLOW)]
    middle = len(ranges) // 2
    low, high = _search_steps(ranges[:middle]), _search_steps(ranges[middle:])
    return [(_AT_LEAST, len(low), 0, ranges[middle][0]), *low, *high]


def _ranges(column: int) -> list[tuple[int, int]]:
    """The allowed numbers, as first and last of those that follow each other."""
    entries = [entry.split() for entry in _ALLOWED.split(",")]
    found: list[tuple[int, int]] = []
    for number in sorted(int(entry[1 + column]) for entry in entries if entry[1 + column] != "-"):
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found
