"""Broadcast buckets: what other processes receive, and what happens when one of them dies."""

import dataclasses
import pickle
import subprocess
import sys
import threading
import time

import pytest
import torch

from posttrain.weight_sync.broadcast import BroadcastConnection, BroadcastRank, BroadcastRendezvous, RankLost
from posttrain.weight_sync.sender import WeightSender

RECEIVER = """
import pickle, sys, torch
from posttrain.weight_sync.broadcast import RankLost
from posttrain.weight_sync.buckets import BucketReader
reader = BucketReader(int(sys.argv[1]))
print("up", flush=True)
for line in sys.stdin:
    bucket = pickle.loads(bytes.fromhex(line))
    try:
        print({name: round(float(t.double().sum()), 4) for name, t in reader.tensors(bucket)}, flush=True)
    except RankLost as error:
        print(error, flush=True)
"""


@pytest.fixture
def receivers():
    """Starts processes that print the sums of the tensors in the buckets that they are told of."""
    started = []

    def start(count):
        for rank in range(count):
            command = [sys.executable, "-c", RECEIVER, str(rank)]
            started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        for process in started:
            assert process.stdout.readline() == "up\n"
        return started

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def tell(process, bucket):
    process.stdin.write(pickle.dumps(bucket).hex() + "\n")
    process.stdin.flush()


def sums(weights):
    return {name: round(float(t.double().sum()), 4) for name, t in weights.items()}


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    return {f"w{n}": torch.randn(n + 1, 40, generator=generator) for n in range(5)}


@pytest.fixture
def connection():
    """The connection of this process, which sends."""
    made = BroadcastConnection()
    yield made
    made.close()


def send_all(group, receivers, given, connection):
    """Send through two buffers in turn, and announce each as soon as it is filled."""
    sender = WeightSender(given.items(), torch.float32, group, bucket_bytes=700, connection=connection)
    slot = told = 0
    while (bucket := sender.next(slot)) is not None:
        for process in receivers:
            tell(process, bucket)
        sender.send(slot)
        slot ^= 1
        told += 1
    sender.close()
    return told


def test_all_ranks_receive_the_weights(receivers, connection):
    rendezvous = BroadcastRendezvous("127.0.0.1", 3, 60.0)
    processes = receivers(2)
    for seed in (0, 1):  # the group is used again
        given = weights(seed)
        told = send_all(rendezvous.group, processes, given, connection)
        assert told > 2
        for process in processes:
            found = {}
            for _ in range(told):
                found |= eval(process.stdout.readline())
            assert found == sums(given)


def test_ranks_leave_a_group_that_lost_a_rank(receivers, connection):
    rendezvous = BroadcastRendezvous("127.0.0.1", 3, 60.0)
    living, dying = processes = receivers(2)
    told = send_all(rendezvous.group, processes, weights(0), connection)
    lines = [living.stdout.readline() for _ in range(told)]
    assert all("w" in line for line in lines)
    dying.kill()
    dying.wait()
    sender = WeightSender(weights(1).items(), torch.float32, rendezvous.group, connection=connection)
    begun = time.monotonic()
    tell(living, sender.next(0))
    rendezvous.announce_loss("sampler 1")
    assert "gave up a broadcast of weights" in living.stdout.readline()
    sender.send(0)
    sender.close()  # the sender does not wait either, and raises nothing
    assert time.monotonic() - begun < 20
    with pytest.raises(RankLost, match="has lost a rank"):
        connection.join(rendezvous.group, 0, torch.device("cpu"))


def test_leaves_a_group_once_with_two_pending_buckets(receivers, connection):
    """The wait for the second bucket ends as that for the first, although the group has been left meanwhile."""
    rendezvous = BroadcastRendezvous("127.0.0.1", 2, 30.0)
    [other] = receivers(1)
    sender = WeightSender(
        ((f"w{i}", torch.ones(1000)) for i in range(3)), torch.float32, rendezvous.group, bucket_bytes=4000
    )
    first = sender.next(0)
    other.stdin.write(pickle.dumps(dataclasses.replace(first, first_rank=1)).hex() + "\n")
    other.stdin.flush()
    sender.send(0)
    assert other.stdout.readline() == "{'w0': 1000.0}\n"
    for slot in (1, 0):
        assert sender.next(slot) is not None
        sender.send(slot)  # nobody receives these
    rendezvous.announce_loss("the other")
    began = time.monotonic()
    sender.close()
    assert time.monotonic() - began < 20


def test_rendezvous_of_one_rank_ends_at_its_deadline(receivers, connection):
    rendezvous = BroadcastRendezvous("127.0.0.1", 2, 1.0)
    with pytest.raises(RankLost, match="rank 0 of 2 gave up"):
        BroadcastRank(rendezvous.group, 0, torch.device("cpu")).start(torch.zeros(8, dtype=torch.uint8))


def test_wait_for_the_rendezvous_ends_with_a_lost_rank(receivers, connection):
    rendezvous = BroadcastRendezvous("127.0.0.1", 2, 60.0)
    threading.Timer(0.5, rendezvous.announce_loss, ["sampler 3"]).start()
    begun = time.monotonic()
    with pytest.raises(RankLost, match="sampler 3 was lost"):
        connection.join(rendezvous.group, 0, torch.device("cpu")).start(torch.zeros(8, dtype=torch.uint8))
    assert time.monotonic() - begun < 20


def test_reports_the_first_lost_rank(receivers, connection):
    rendezvous = BroadcastRendezvous("127.0.0.1", 2, 60.0)
    for who in ("sampler 1", "sampler 0, which was told of it"):
        rendezvous.announce_loss(who)
    assert rendezvous.lost == "sampler 1"
    with pytest.raises(RankLost, match="sampler 1 was lost"):
        connection.join(rendezvous.group, 0, torch.device("cpu")).start(torch.zeros(8, dtype=torch.uint8))


def test_joins_a_new_group_at_the_port_of_one_that_was_left(connection):
    rendezvous = BroadcastRendezvous("127.0.0.1", 2, 1.0)
    connection.join(dataclasses.replace(rendezvous.group, name="another"), 0, torch.device("cpu")).leave()
    with pytest.raises(RankLost, match="rank 0 of 2 gave up"):  # nobody comes, but it is not refused
        connection.join(rendezvous.group, 0, torch.device("cpu")).start(torch.zeros(8, dtype=torch.uint8))
