"""What the benchmark of two nodes reads: NCCL's logs, and the steps of a run that is going on."""

import pytest

LOG = """\
vm:10:60 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to pt0
vm:10:60 [0] NCCL INFO NET/Socket : Using [0]pt0:10.77.0.1<0>
vm:10:60 [0] NCCL INFO Channel 00/02 : 0 1
vm:10:60 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
vm:10:60 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/Socket/0
"""


@pytest.fixture
def bench(load):
    return load("bench_nodes")


def test_transports_are_those_of_channels_to_other_ranks(bench, tmp_path):
    log = tmp_path / "node0.10.log"
    log.write_text(LOG)
    assert bench.transports([log]) == {"NET/Socket": 2}
    log.write_text(LOG + "vm:10:60 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n")
    other = tmp_path / "node1.11.log"
    other.write_text("vm:11:60 [0] NCCL INFO Channel 00 : 1[1] -> 0[0] via SHM/direct/direct\n")
    assert bench.transports([log, other]) == {"NET/Socket": 2, "P2P": 1, "SHM": 1}


def test_steps_are_those_whose_line_is_whole(bench, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    assert bench.rows_of(metrics) == []
    metrics.write_text('{"step": 1, "time": 10.0}\n{"step": 2, "time": 20.0}\n{"step": 3, "ti')
    assert [row["step"] for row in bench.rows_of(metrics)] == [1, 2]
    assert [row["step"] for row in bench.rows_of(metrics, since=15.0)] == [2]
