"""Ports for process groups that tests start."""

import random
import socket
from contextlib import ExitStack

_FROM, _TO = 20_000, 32_000
"""Below those that the kernel gives to connections of all programs, of which one could take a port before its group
does."""


def free_ports(count: int) -> list[str]:
    """Return ports at which nobody listens, one for each process group: a rank that is early would find the store of
    the group before."""
    found: list[str] = []
    with ExitStack() as opened:
        while len(found) < count:
            one = opened.enter_context(socket.socket())
            port = random.SystemRandom().randrange(_FROM, _TO)
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(str(port))
    return found
