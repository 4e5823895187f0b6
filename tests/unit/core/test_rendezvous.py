"""Who can connect to the processes of a run on one machine: nobody from elsewhere."""

import ipaddress
import os
import socket
import subprocess
import sys
from datetime import timedelta

import psutil
import pytest

from posttrain.core import rendezvous
from tests.helpers.ports import free_ports

WORK = """
import sys
from posttrain.config import TrainConfig
from posttrain.models.load import ModelSource
from posttrain.train.spec import WorkerSpec
from posttrain.train.worker import TrainWorker

rank, port = int(sys.argv[1]), int(sys.argv[2])
spec = WorkerSpec(ModelSource("builtin:tiny"), "cpu", "float32", 0, 1.0, TrainConfig(), threads=1)
worker = TrainWorker(spec, rank, 2)
worker.setup("127.0.0.1", port, 60.0)
print("ready", flush=True)
sys.stdin.readline()
"""


def listening(process):
    """Addresses at which a process accepts connections."""
    found = psutil.Process(process).net_connections("inet")
    return {ipaddress.ip_address(c.laddr.ip.removeprefix("::ffff:")) for c in found if c.status == psutil.CONN_LISTEN}


@pytest.mark.slow
def test_workers_of_one_machine_listen_at_the_loopback_address(tmp_path):
    (port,) = free_ports(1)
    # As where the name of the machine is that of its address in the network.
    environment = {k: v for k, v in os.environ.items() if k not in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORK, str(rank), port],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        assert [worker.stdout.readline() for worker in workers] == ["ready\n"] * 2
        for worker in workers:
            addresses = listening(worker.pid)
            assert addresses
            assert all(address.is_loopback for address in addresses), addresses
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def test_a_store_listens_where_the_others_look_for_it():
    store = rendezvous.serve("127.0.0.1", 0, timedelta(seconds=10))
    other = rendezvous.join("127.0.0.1", store.port, timedelta(seconds=10))
    store.set("key", "value")
    assert other.get("key") == b"value"
    with socket.socket() as probe:  # another address of this machine
        assert probe.connect_ex(("127.0.0.2", store.port)) != 0
    with pytest.raises(OSError, match="in use"):
        rendezvous.serve("127.0.0.1", store.port, timedelta(seconds=10))


@pytest.mark.parametrize(("host", "device"), [("127.0.0.1", "lo"), ("10.0.0.1", None), ("node-1", None)])
def test_gloo_and_nccl_use_the_loopback_device_where_processes_meet_there(monkeypatch, host, device):
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [_Address("127.0.0.1")], "eth0": []})
    rendezvous.keep_off_the_network(host)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == os.environ.get("NCCL_SOCKET_IFNAME") == device
    os.environ["NCCL_SOCKET_IFNAME"] = "eth1"
    rendezvous.keep_off_the_network(host)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth1"


class _Address:
    def __init__(self, address):
        self.address = address
