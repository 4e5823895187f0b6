"""Network namespaces of one machine, and a cable between two of them (a veth pair), by system calls alone.

    python scripts/_netns.py        say whether this machine has them; exit code 1: no

Neither `ip` nor a Python package is needed. Without root they are made in a user namespace (`ROOTLESS`).
What the constants mean: netlink(7), rtnetlink(7), netdevice(7), setns(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

CLONE_NEWNET = 0x40000000
RTM_NEWLINK = 16
REQUEST, ACK, EXCL, CREATE = 0x1, 0x4, 0x200, 0x400
IFLA_IFNAME, IFLA_LINKINFO, IFLA_NET_NS_FD = 3, 18, 28
IFLA_INFO_KIND, IFLA_INFO_DATA, VETH_INFO_PEER = 1, 2, 1
SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x8913, 0x8914, 0x8916, 0x891C
IFF_UP = 0x1
OWN = "/proc/thread-self/ns/net"
ROOTLESS = ("unshare", "--user", "--map-root-user", "--net")
"""Put before a command, it gives the command a user namespace in which it may make network namespaces."""

_libc = ctypes.CDLL(None, use_errno=True)


class NetnsError(RuntimeError):
    """This machine gives no network namespaces, or no veth pair between them."""


def _call(name: str, *arguments: int) -> None:
    if getattr(_libc, name)(*arguments):
        code = ctypes.get_errno()
        raise NetnsError(f"{name}: {os.strerror(code)}; network namespaces need root, or {' '.join(ROOTLESS)}")


class Namespace:
    """A network namespace. It exists as long as this object is open or a process is in it."""

    def __init__(self) -> None:
        own = os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _call("unshare", CLONE_NEWNET)
            self._fd = os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)
            _set_link("lo", True)
            _call("setns", own, CLONE_NEWNET)
        finally:
            os.close(own)

    def fileno(self) -> int:
        return self._fd

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Move this thread into the namespace; sockets and processes that it makes there stay there."""
        own = os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)
        _call("setns", self._fd, CLONE_NEWNET)
        try:
            yield
        finally:
            _call("setns", own, CLONE_NEWNET)
            os.close(own)

    def pids(self) -> list[int]:
        """Return the processes in the namespace, without this one."""
        here, found = os.fstat(self._fd).st_ino, []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid():
                with contextlib.suppress(OSError):  # it has just ended, or belongs to somebody else
                    if os.stat(f"/proc/{entry}/ns/net").st_ino == here:
                        found.append(int(entry))
        return found

    def kill(self, deadline_s: float = 30.0) -> int:
        """End all processes in the namespace with SIGKILL; returns how many. Raises ``NetnsError`` if some stay."""
        killed: set[int] = set()
        end = time.monotonic() + deadline_s
        while living := [pid for pid in self.pids() if _lives(pid)]:
            if time.monotonic() > end:
                raise NetnsError(f"processes {living} did not end within {deadline_s:g} s of SIGKILL")
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            time.sleep(0.01)
        return len(killed)

    def received(self, device: str) -> int:
        """Return the bytes that a device of the namespace has received."""
        with self.inside():
            lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith(f"{device}:"))

    def set_link(self, device: str, up: bool) -> None:
        """Set a device up or down; one that is down is a cable that was pulled."""
        with self.inside():
            _set_link(device, up)

    def close(self) -> None:
        os.close(self._fd)


def connect(ends: tuple[Namespace, Namespace], device: str, addresses: tuple[str, str]) -> None:
    """Join two namespaces by a veth pair: one ``device`` of that name in each, with its address, in a /24 network.

    Raises:
        NetnsError: the kernel has no veth devices, or does not permit to make them.
    """
    first, second = (_name(device) + _attribute(IFLA_NET_NS_FD, struct.pack("I", end.fileno())) for end in ends)
    no_link = struct.pack("BxHiII", socket.AF_UNSPEC, 0, 0, 0, 0)  # ifinfomsg: nothing of it is known yet
    peer = _attribute(IFLA_INFO_DATA, _attribute(VETH_INFO_PEER, no_link + second))
    info = _attribute(IFLA_LINKINFO, _attribute(IFLA_INFO_KIND, b"veth") + peer)
    body = no_link + first + info
    with ends[0].inside(), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.settimeout(10.0)
        netlink.send(struct.pack("IHHII", 16 + len(body), RTM_NEWLINK, REQUEST | ACK | EXCL | CREATE, 1, 0) + body)
        code = -struct.unpack_from("i", netlink.recv(4096), 16)[0]
    if code:
        hint = "; has the kernel CONFIG_VETH, or the module veth?" if code == errno.EOPNOTSUPP else ""
        raise NetnsError(f"cannot make a veth pair: {os.strerror(code)}{hint}")
    for end, address in zip(ends, addresses, strict=True):
        with end.inside():
            _set_address(device, address)
            _set_link(device, True)


def _name(device: str) -> bytes:
    return _attribute(IFLA_IFNAME, device.encode() + b"\0")


def _attribute(kind: int, value: bytes) -> bytes:
    """Return an attribute of a netlink message; its length is that without the padding."""
    return struct.pack("HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def _set_address(device: str, address: str) -> None:
    """Give a device of this thread's namespace an address in a /24 network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for request, value in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, "255.255.255.0")):
            of_kind = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
            fcntl.ioctl(any_socket, request, struct.pack("16s24s", device.encode(), of_kind))


def _set_link(device: str, up: bool) -> None:
    """Set a device of this thread's namespace up or down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        found = fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack("16s24x", device.encode()))
        flags = struct.unpack_from("16xH", found)[0] & ~IFF_UP
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", device.encode(), flags | (IFF_UP if up else 0)))


def _lives(pid: int) -> bool:
    """Return whether a process has not ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def try_it() -> None:
    """Make two namespaces and send something from one to the other. Raises ``NetnsError``."""
    ends = Namespace(), Namespace()
    try:
        connect(ends, "try0", ("10.77.0.1", "10.77.0.2"))
        with ends[1].inside():
            listener = socket.create_server(("10.77.0.2", 0))
        with listener, ends[0].inside(), socket.create_connection(listener.getsockname(), timeout=10.0):
            listener.accept()[0].close()
    finally:
        for end in ends:
            end.close()


if __name__ == "__main__":
    try:
        try_it()
    except NetnsError as error:
        sys.exit(f"no network namespaces: {error}")
