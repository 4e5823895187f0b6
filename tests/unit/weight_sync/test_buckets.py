"""Weights that other processes read: what lies where, and how they are divided into buckets."""

import os
import pickle
import subprocess
import sys

import pytest
import torch

from posttrain.weight_sync.buckets import BucketReader, mapped
from posttrain.weight_sync.sender import WeightSender


def weights(*sizes, dtype=torch.float32):
    return {
        f"w{n}": torch.randn(size, generator=torch.Generator().manual_seed(n)).to(dtype) for n, size in enumerate(sizes)
    }


def handed_out(sender):
    """Copies of all buckets."""
    found, slot = [], 0
    while (bucket := sender.next(slot)) is not None:
        found.append({name: tensor.clone() for name, tensor in BucketReader().tensors(bucket)})
        slot ^= 1
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_arrive_unchanged(dtype):
    given = {
        **weights(3, 1, 700, 64, dtype=dtype),
        "matrix": torch.arange(12.0).view(3, 4).to(dtype),
        "none": torch.empty(0),
    }
    sender = WeightSender(given.items(), dtype, "host")
    [found] = handed_out(sender)
    sender.close()
    assert list(found) == list(given)
    for name, tensor in given.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor.to(dtype))


@pytest.mark.parametrize(("sizes", "expected"), [
    ((16, 16, 16), [["w0", "w1"], ["w2"]]),
    ((16, 200, 16, 16), [["w0"], ["w1"], ["w2", "w3"]]),  # one alone may be larger
    ((33, 1), [["w0"], ["w1"]]),
    ((), []),
])  # fmt: skip
def test_buckets_hold_what_fits(sizes, expected):
    given = weights(*sizes)
    sender = WeightSender(given.items(), torch.float32, "host", bucket_bytes=128)
    found = handed_out(sender)
    sender.close()
    assert [list(bucket) for bucket in found] == expected
    assert all(torch.equal(tensor, given[name]) for bucket in found for name, tensor in bucket.items())


def test_bucket_stays_valid_while_the_next_is_filled():
    given = weights(16, 16, 16)
    sender = WeightSender(given.items(), torch.float32, "host", bucket_bytes=64)
    first, second = sender.next(0), sender.next(1)
    for bucket, name in ((first, "w0"), (second, "w1")):
        [(found, tensor)] = BucketReader().tensors(bucket)
        assert found == name
        assert torch.equal(tensor, given[name])
    sender.close()
    assert not os.path.exists(first.path)
    assert not os.path.exists(second.path)


def test_killed_sender_leaves_no_shared_memory():
    """Nobody else removes what the sender of weights held."""
    holder = (
        "import torch, time\n"
        "from posttrain.weight_sync.sender import WeightSender\n"
        "sender = WeightSender([('w', torch.ones(4))], torch.float32, 'host', bucket_bytes=1 << 20)\n"
        "print(sender.next(0).path, flush=True)\n"
        "time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True) as process:
        path = process.stdout.readline().strip()
        read = mapped(path)  # as an engine, which goes on reading
        process.kill()
        process.wait()
    assert not os.path.exists(path)
    assert read[:16].view(torch.float32).tolist() == [1.0] * 4
    assert read.numel() == 1 << 20


def test_keeps_no_bucket_where_nobody_reads():
    drawn = []

    def draw():
        for item in weights(16, 16, 16).items():
            drawn.append(item[0])
            yield item

    sender = WeightSender(draw(), torch.float32, None, bucket_bytes=128)
    counts = []
    while (bucket := sender.next(0)) is not None:
        assert bucket.path is None
        assert not bucket.entries
        counts.append(len(drawn))
    assert drawn == ["w0", "w1", "w2"]
    assert len(counts) == 2  # as many buckets as where they are read
    sender.close()


def test_another_process_reads_a_bucket():
    given = weights(5, 7)
    sender = WeightSender(given.items(), torch.float32, "host")
    bucket = sender.next(0)
    code = (
        "import pickle, sys\n"
        "from posttrain.weight_sync.buckets import BucketReader\n"
        "bucket = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "print(bucket.shapes, [round(float(t.sum()), 4) for _, t in BucketReader().tensors(bucket)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, pickle.dumps(bucket).hex()], capture_output=True, text=True, timeout=60, check=True
    )
    sender.close()
    assert done.stdout.strip() == f"{bucket.shapes} {[round(float(t.sum()), 4) for t in given.values()]}"
