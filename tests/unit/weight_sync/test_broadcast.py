"""Buckets that are sent: what arrives in other processes, and what happens when one of them does not live."""

import dataclasses
import pickle
import subprocess
import sys
import threading
import time

import pytest
import torch

from posttrain.weight_sync.broadcast import Meeting, Member, MemberLost
from posttrain.weight_sync.buckets import Outlet

RECEIVER = """
import pickle, sys, torch
from posttrain.weight_sync.broadcast import MemberLost
print("up", flush=True)
for line in sys.stdin:
    bucket = pickle.loads(bytes.fromhex(line))
    try:
        print({name: round(float(t.double().sum()), 4) for name, t in bucket.tensors(int(sys.argv[1]))}, flush=True)
    except MemberLost as error:
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
    outlet = Outlet(given.items(), torch.float32, group, bucket_bytes=700)
    slot = told = 0
    while (bucket := outlet.next(slot)) is not None:
        for process in receivers:
            tell(process, bucket)
        outlet.send(slot)
        slot ^= 1
        told += 1
    outlet.close()
    return told


def test_all_receivers_get_the_tensors_sent(receivers):
    meeting = Meeting("127.0.0.1", 3, 60.0)
    processes = receivers(2)
    for seed in (0, 1):  # the group is used again
        given = weights(seed)
        told = send_all(meeting.group, processes, given)
        assert told > 2
        for process in processes:
            found = {}
            for _ in range(told):
                found |= eval(process.stdout.readline())
            assert found == sums(given)


def test_rank_waiting_for_a_lost_rank_gives_up(receivers):
    meeting = Meeting("127.0.0.1", 3, 60.0)
    living, dying = processes = receivers(2)
    told = send_all(meeting.group, processes, weights(0))
    lines = [living.stdout.readline() for _ in range(told)]
    assert all("w" in line for line in lines)
    dying.kill()
    dying.wait()
    outlet = Outlet(weights(1).items(), torch.float32, meeting.group)
    begun = time.monotonic()
    tell(living, outlet.next(0))
    meeting.announce_loss("sampler 1")
    assert "gave up a broadcast of weights" in living.stdout.readline()
    outlet.send(0)
    outlet.close()  # the sender does not wait either, and raises nothing
    assert time.monotonic() - begun < 20
    with pytest.raises(MemberLost, match="has lost a member"):
        Member.of(meeting.group, 0, torch.device("cpu"))


def test_rank_with_two_pending_buckets_leaves_once(receivers):
    """The wait for the second one ends in the same way, and not in the ruins of the group that the first one left."""
    meeting = Meeting("127.0.0.1", 2, 30.0)
    [other] = receivers(1)
    outlet = Outlet(((f"w{i}", torch.ones(1000)) for i in range(3)), torch.float32, meeting.group, bucket_bytes=4000)
    first = outlet.next(0)
    other.stdin.write(pickle.dumps(dataclasses.replace(first, first_rank=1)).hex() + "\n")
    other.stdin.flush()
    outlet.send(0)
    assert other.stdout.readline() == "{'w0': 1000.0}\n"
    for slot in (1, 0):
        assert outlet.next(slot) is not None
        outlet.send(slot)  # nobody receives these
    meeting.announce_loss("the other")
    began = time.monotonic()
    outlet.close()
    assert time.monotonic() - began < 20


def test_rendezvous_of_one_rank_times_out_with_a_message(receivers):
    meeting = Meeting("127.0.0.1", 2, 1.0)
    with pytest.raises(MemberLost, match="rank 0 of 2 gave up"):
        Member(meeting.group, 0, torch.device("cpu")).start(torch.zeros(8, dtype=torch.uint8))


def test_rank_waiting_for_the_process_group_is_told_of_a_loss(receivers):
    meeting = Meeting("127.0.0.1", 2, 60.0)
    threading.Timer(0.5, meeting.announce_loss, ["sampler 3"]).start()
    begun = time.monotonic()
    with pytest.raises(MemberLost, match="sampler 3 was lost"):
        Member.of(meeting.group, 0, torch.device("cpu")).start(torch.zeros(8, dtype=torch.uint8))
    assert time.monotonic() - begun < 20


def test_reports_the_first_loss(receivers):
    meeting = Meeting("127.0.0.1", 2, 60.0)
    for who in ("sampler 1", "sampler 0, which was told of it"):
        meeting.announce_loss(who)
    assert meeting.lost == "sampler 1"
    with pytest.raises(MemberLost, match="sampler 1 was lost"):
        Member.of(meeting.group, 0, torch.device("cpu")).start(torch.zeros(8, dtype=torch.uint8))


def test_new_process_group_may_reuse_the_port(monkeypatch):
    meeting = Meeting("127.0.0.1", 2, 1.0)
    monkeypatch.setattr(Member, "_given_up", dataclasses.replace(meeting.group, name="another"))
    with pytest.raises(MemberLost, match="rank 0 of 2 gave up"):  # nobody comes, but it is not refused
        Member.of(meeting.group, 0, torch.device("cpu")).start(torch.zeros(8, dtype=torch.uint8))
