"""Check the address of a Ray cluster without Ray, which would try to connect for minutes."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from posttrain.core.errors import ConfigError


def check_address(address: str, deadline_s: float) -> None:
    """Connect to ``host:port`` (TCP) and hang up. ``auto`` is left to Ray, which finds the cluster of this machine.

    Raises:
        ConfigError: the address is malformed, or nobody answers within ``deadline_s`` seconds.
    """
    if address == "auto":
        return
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError as error:  # a port that is not a number, say
        raise _not_an_address(address) from error
    if not host or not port:
        raise _not_an_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        socket.create_connection((host, port), timeout=deadline_s / len(found)).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"no Ray cluster at cluster.address = {address!r}: {reason}",
            hint="start Ray there (`ray start --head`), or run without cluster.address to start Ray on this machine",
        ) from error


def _not_an_address(address: str) -> ConfigError:
    return ConfigError(f"cluster.address = {address!r} is not of the form host:port", hint="for example 10.0.0.1:6379")
