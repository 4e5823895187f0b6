"""Where processes of a group find each other: a key-value store of torch's that listens at one address of a machine.

torch's own listens at all of them, and asks nobody for a secret. Here it has the address that the others connect to,
which for processes of one machine is the loopback address, so that nobody else reaches it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta

import psutil
from torch._C._distributed_c10d import TCPStore


def serve(host: str, port: int, timeout: timedelta) -> TCPStore:
    """Open a store at an address of this machine, for as long as the result lives.

    Args:
        port: 0: a free one, which the result names.
        timeout: longest wait for a key.

    Raises:
        OSError: the address is not of this machine, or the port is taken.
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
    """Let gloo and NCCL, which listen in each process of a group, use the loopback device where ``host``, at which the
    processes meet, is its address. What the user has set stays."""
    try:
        if not ipaddress.ip_address(host).is_loopback:
            return
    except ValueError:  # a name, which may be of any device
        return
    devices = psutil.net_if_addrs().items()
    device = next((name for name, held in devices if any(one.address == host for one in held)), None)
    if device is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", device)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", device)
