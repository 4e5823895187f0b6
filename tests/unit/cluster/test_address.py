"""The address of a Ray cluster is tried before anything else happens."""

import socket
import time

import pytest

from posttrain.cluster.address import check_address
from posttrain.core.errors import ConfigError


def test_an_address_where_somebody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_address(f"127.0.0.1:{port}", 5.0)
        check_address(f"ray://127.0.0.1:{port}", 5.0)
    with pytest.raises(ConfigError, match=f"cluster.address = '127.0.0.1:{port}': Connection refused"):
        check_address(f"127.0.0.1:{port}", 5.0)


def test_ray_finds_the_cluster_of_this_machine_itself() -> None:
    check_address("auto", 5.0)


@pytest.mark.parametrize("address", ["garbage", "host:", ":6379", "host:port", "host:99999", "[::1", ""])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="is not of the form host:port") as error:
        check_address(address, 5.0)
    assert repr(address) in error.value.message
    assert "10.0.0.1:6379" in (error.value.hint or "")


def test_a_host_that_never_answers_is_given_up_in_time() -> None:
    with socket.socket() as full:  # a backlog that is full: the kernel drops further connections unanswered
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        started = time.monotonic()
        with pytest.raises(ConfigError, match="timed out"):
            check_address(f"127.0.0.1:{full.getsockname()[1]}", 0.5)
        assert time.monotonic() - started < 30.0
        for client in waiting:
            client.close()
