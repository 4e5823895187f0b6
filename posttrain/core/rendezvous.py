"""The rendezvous of a process group: torch's key-value store, listening at one address of a machine.

By default torch's store listens at all addresses and asks for no secret. Here it listens only at the address that the
other processes connect to. For processes of one machine that is the loopback address, which nobody else reaches.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta

import psutil
from torch._C._distributed_c10d import TCPStore


def serve(host: str, port: int, timeout: timedelta) -> TCPStore:
    """Open a store at an address of this machine. It is open as long as the result exists.

    Args:
        port: 0: a free port, which the result names.
        timeout: longest wait for a key.

    Raises:
        OSError: this machine does not have the address, or the port is taken.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family)
    port = listener.getsockname()[1]
    keep_off_the_network(host)
    # The store owns the socket from here on.
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def join(host: str, port: int, timeout: timedelta) -> TCPStore:
    """Connect to a store that another process serves. Raises ``RuntimeError`` where none answers within ``timeout``."""
    keep_off_the_network(host)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def keep_off_the_network(host: str) -> None:
    """Make gloo and NCCL, which listen in each process of a group, use the loopback device where the rendezvous
    address ``host`` is a loopback address. Variables that the user has set stay."""
    try:
        if not ipaddress.ip_address(host).is_loopback:
            return
    except ValueError:  # a host name, which any device may have
        return
    devices = psutil.net_if_addrs().items()
    device = next((name for name, held in devices if any(one.address == host for one in held)), None)
    if device is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", device)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", device)
