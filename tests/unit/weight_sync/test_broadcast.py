"""Buckets that are sent: what arrives in other processes, and what happens when one of them does not live."""

import dataclasses
import pickle
import subprocess
import sys
import threading
import time

import pytest
import torch

from posttrain.weight_sync.broadcast import BroadcastRendezvous, Member, RankLost
from posttrain.weight_sync.sender import WeightSender

RECEIVER = """
import pickle, sys, torch
from posttrain.weight_sync.broadcast import RankLost
print("up", flush=True)
for line in sys.stdin:
    bucket = pickle.loads(bytes.fromhex(line))
    try:
        print({name: round(float(t.double().sum()), 4) for name, t in bucket.tensors(int(sys.argv[1]))}, flush=True)
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
    if Member._current is not None:
        Member._current.leave()


def tell(process, bucket):
    process.stdin.write(pickle.dumps(bucket).hex() + "\n")
    process.stdin.flush()


def sums(weights):
    return {name: round(float(t.double().sum()), 4) for name, t in weights.items()}


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    return {f"w{n}": torch.randn(n + 1, 40, generator=generator) for n in range(5)}


def send_all(group, receivers, given):
    """Through two places in turn, each told of as soon as it is filled."""
    sender = WeightSender(given.items(), torch.float32, group, bucket_bytes=700)
    slot = told = 0
    while (bucket := sender.next(slot)) is not None:
        for process in receivers:
            tell(process, bucket)
        sender.send(slot)
        slot ^= 1
        told += 1
    sender.close()
    return told


def test_all_receive_what_was_sent(receivers):
    rendezvous = BroadcastRendezvous("127.0.0.1", 3, 60.0)
    processes = receivers(2)
    for seed in (0, 1):  # the group is used again
        given = weights(seed)
        told = send_all(rendezvous.group, processes, given)
        assert told > 2
        for process in processes:
            found = {}
            for _ in range(told):
                found |= eval(process.stdout.readline())
            assert found == sums(given)


def test_whoever_waits_for_a_lost_member_gives_up(receivers):
    rendezvous = BroadcastRendezvous("127.0.0.1", 3, 60.0)
    living, dying = processes = receivers(2)
    told = send_all(rendezvous.group, processes, weights(0))
    lines = [living.stdout.readline() for _ in range(told)]
    assert all("w" in line for line in lines)
    dying.kill()
    dying.wait()
    sender = WeightSender(weights(1).items(), torch.float32, rendezvous.group)
    begun = time.monotonic()
    tell(living, sender.next(0))
    rendezvous.announce_loss("sampler 1")
    assert "gave up a broadcast of weights" in living.stdout.readline()
    sender.send(0)
    sender.close()  # the sender does not wait either, and raises nothing
    assert time.monotonic() - begun < 20
    with pytest.raises(RankLost, match="has lost a member"):
        Member.of(rendezvous.group, 0, torch.device("cpu"))


def test_whoever_has_two_buckets_on_their_way_leaves_once(receivers):
    """The wait for the second one ends in the same way, and not in the ruins of the group that the first one left."""
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


def test_who_comes_to_a_meeting_alone_is_told(receivers):
    rendezvous = BroadcastRendezvous("127.0.0.1", 2, 1.0)
    with pytest.raises(RankLost, match="rank 0 of 2 gave up"):
        Member(rendezvous.group, 0, torch.device("cpu")).start(torch.zeros(8, dtype=torch.uint8))


def test_whoever_waits_for_the_group_to_come_together_hears_of_a_loss(receivers):
    rendezvous = BroadcastRendezvous("127.0.0.1", 2, 60.0)
    threading.Timer(0.5, rendezvous.announce_loss, ["sampler 3"]).start()
    begun = time.monotonic()
    with pytest.raises(RankLost, match="sampler 3 was lost"):
        Member.of(rendezvous.group, 0, torch.device("cpu")).start(torch.zeros(8, dtype=torch.uint8))
    assert time.monotonic() - begun < 20


def test_the_first_loss_is_the_one_to_hear_of(receivers):
    rendezvous = BroadcastRendezvous("127.0.0.1", 2, 60.0)
    for who in ("sampler 1", "sampler 0, which was told of it"):
        rendezvous.announce_loss(who)
    assert rendezvous.lost == "sampler 1"
    with pytest.raises(RankLost, match="sampler 1 was lost"):
        Member.of(rendezvous.group, 0, torch.device("cpu")).start(torch.zeros(8, dtype=torch.uint8))


def test_a_new_group_may_have_the_port_of_one_that_was_given_up(monkeypatch):
    rendezvous = BroadcastRendezvous("127.0.0.1", 2, 1.0)
    monkeypatch.setattr(Member, "_given_up", dataclasses.replace(rendezvous.group, name="another"))
    with pytest.raises(RankLost, match="rank 0 of 2 gave up"):  # nobody comes, but it is not refused
        Member.of(rendezvous.group, 0, torch.device("cpu")).start(torch.zeros(8, dtype=torch.uint8))
