"""The stream of samples: the same whatever renders it, at the same place after any death, and clear when it cannot."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partialmethod
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.config import DataConfig
from posttrain.core.errors import DataError, DeadlineError, WorkerError
from posttrain.data.loader import BatchOrder
from posttrain.data.prefetch import Ahead, Rendered, Row
from posttrain.data.shards import ShardReader, Shards
from posttrain.data.stream import Batch, SampleStream
from tests.helpers.stream_driver import BATCH, Numbers, digest, open_stream, write

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, int]]]:
    """200 rows in three shards; with 64 in memory, an epoch is four windows."""
    folder = tmp_path_factory.mktemp("shards")
    return folder, write(folder, [90, 30, 80])


def take(stream: SampleStream, count: int) -> list[Batch]:
    return [stream.next() for _ in range(count)]


def rows_of(batches: Sequence[Batch]) -> list[int]:
    return [sample.row for batch in batches for sample in batch.samples]


def contents(batches: Sequence[Batch]) -> list[str]:
    return [digest(batch.samples) for batch in batches]


# ---------------------------------------------------------------------- order


def test_every_epoch_has_every_row_once_and_in_an_order_of_its_own(data: tuple[Path, list[tuple[int, int]]]) -> None:
    folder, rows = data
    kept = [number for number, length in rows if length]
    with open_stream(folder, 0) as stream:
        batches = take(stream, 3 * len(kept) // BATCH)
    drawn = rows_of(batches)
    epochs = [drawn[i * len(kept) : (i + 1) * len(kept)] for i in range(3)]
    assert [sorted(epoch) for epoch in epochs[:2]] == [kept, kept]
    assert len(set(epochs[2])) == len(epochs[2]) > len(kept) - BATCH
    assert epochs[0] != epochs[1] != kept
    for batch in batches:
        for sample in batch.samples:
            number, length = rows[sample.row]
            assert sample.ids.tolist() == list(range(number, number + length))
        assert len(batch.samples) == BATCH


@pytest.mark.parametrize("shuffle_rows", [64, 1000])
def test_the_order_does_not_depend_on_who_renders(data: tuple[Path, list[tuple[int, int]]], shuffle_rows: int) -> None:
    expected: list[Batch] = []
    for workers, stream_above, prefetch in ((0, 1000, 3), (0, 0, 1), (3, 0, 8)):
        settings = {"shuffle_rows": shuffle_rows, "stream_above": stream_above, "prefetch": prefetch}
        with open_stream(data[0], workers, 0.003, **settings) as stream:
            batches = take(stream, 30)
        expected = expected or batches
        assert rows_of(batches) == rows_of(expected)
        assert contents(batches) == contents(expected)
        assert [(b.position, b.counts) for b in batches] == [(b.position, b.counts) for b in expected]


def test_small_data_has_the_order_of_the_plain_loader(tmp_path: Path) -> None:
    table = pa.table({"messages": [[n, 1] for n in range(50)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    order = BatchOrder(50, BATCH, seed=7)
    with open_stream(tmp_path, 0) as stream:
        assert [rows_of([stream.next()]) for _ in range(20)] == [order.next() for _ in range(20)]


@pytest.mark.parametrize("stream_above", [0, 1000])
def test_data_of_which_most_rows_are_left_out_gives_the_others_in_every_epoch(
    tmp_path: Path, stream_above: int
) -> None:
    """The last rows of an epoch and the first ones of the next may be more than an epoch has."""
    table = pa.table({"messages": [[n, int(n == 4)] for n in range(20)]})
    pq.write_table(table, tmp_path / "a.parquet")
    with open_stream(tmp_path, 0, stream_above=stream_above) as stream:
        assert rows_of(take(stream, 10)) == [4] * 10 * BATCH


def test_streamed_data_of_which_all_rows_are_left_out_is_an_error(tmp_path: Path) -> None:
    pq.write_table(pa.table({"messages": [[n, 0] for n in range(20)]}), tmp_path / "a.parquet")
    with open_stream(tmp_path, 0) as stream, pytest.raises(DataError, match="no conversation with assistant tokens"):
        stream.next()


def test_without_shuffle_rows_come_as_they_lie(data: tuple[Path, list[tuple[int, int]]]) -> None:
    folder, rows = data
    with open_stream(folder, 0, shuffle=False) as stream:
        drawn = rows_of(take(stream, 40))
    kept = [number for number, length in rows if length]
    assert drawn == (kept * 2)[: 40 * BATCH]


def test_a_large_row_group_is_mixed_with_others(tmp_path: Path) -> None:
    """Neighbours in a file are often alike: a window is drawn from several places."""
    write(tmp_path, [200, 200, 200, 200], group=200)
    with open_stream(tmp_path, 0, shuffle_rows=64) as stream:
        first = rows_of(take(stream, 6))
    assert {row // 200 for row in first} == {0, 1, 2, 3}


# ---------------------------------------------------------------------- resume


@pytest.mark.parametrize("stream_above", [0, 1000])
@pytest.mark.parametrize("taken", [0, 1, 9, 21, 47])
def test_a_restored_stream_goes_on_where_it_stopped(
    data: tuple[Path, list[tuple[int, int]]], taken: int, stream_above: int
) -> None:
    with open_stream(data[0], 0, stream_above=stream_above) as stream:
        take(stream, taken)
        state = json.loads(json.dumps(stream.state()))
        expected = take(stream, 12)
    # Neither how it is rendered, nor how much is in memory, has to be as before.
    with open_stream(data[0], 0, prefetch=7, shuffle_rows=8, stream_above=1000 - stream_above) as again:
        again.restore(state)
        batches = take(again, 12)
        assert rows_of(batches) == rows_of(expected)
        assert contents(batches) == contents(expected)
        assert again.counts == expected[-1].counts
        assert again.state()["position"] == expected[-1].position


def test_a_thread_that_still_reads_when_the_stream_is_restored_changes_nothing(
    data: tuple[Path, list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = threading.Event()
    goes_on = threading.Event()
    slow: list[threading.Thread] = []

    class Slow(ShardReader):
        """Holds the first thread in the second window, which begins after 8 pieces."""

        pieces = 0

        def read(self, group: int, start: int, stop: int) -> list[pa.RecordBatch]:
            content = super().read(group, start, stop)
            self.pieces += 1
            thread = threading.current_thread()
            if self.pieces == 10 and thread is not threading.main_thread() and not slow:
                slow.append(thread)
                reads.set()
                goes_on.wait(60)
            return content

    with open_stream(data[0], 0) as stream:
        expected = take(stream, 40)
    monkeypatch.setattr("posttrain.data.stream.ShardReader", Slow)
    monkeypatch.setattr(Ahead, "close", partialmethod(Ahead.close, deadline_s=0.1))
    with open_stream(data[0], 2) as stream:
        state = stream.state()
        before = take(stream, 1)
        assert reads.wait(60)
        stream.restore(state)
        after = take(stream, 1)
        goes_on.set()
        slow[0].join(60)
        assert not slow[0].is_alive()
        after += take(stream, 39)
    assert contents(before) == contents(expected[:1])
    assert contents(after) == contents(expected)


def test_data_that_changed_since_the_checkpoint_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", [50])
    state = open_stream(tmp_path / "a", 0).state()
    write(tmp_path / "b", [49])
    with pytest.raises(DataError, match=r"made with 50 rows of training data; now there are 49"):
        open_stream(tmp_path / "b", 0).restore(state)
    write(tmp_path / "c", [25, 25])
    with pytest.raises(DataError, match="other files"):
        open_stream(tmp_path / "c", 0).restore(state)


def run_and_kill(folder: Path, workers: int, world: int, steps: int, kill_after: int) -> None:
    """Run the driver; kill it, so that nothing can be tidied up, after so many more lines (0: let it end)."""
    log = folder / "log.jsonl"
    before = log.read_text().count("\n") if log.exists() else 0
    command = [sys.executable, str(REPO / "tests" / "helpers" / "stream_driver.py"), str(folder)]
    process = subprocess.Popen(
        [*command, *map(str, (workers, world, steps, kill_after))],
        env=os.environ | {"PYTHONPATH": str(REPO)},
        start_new_session=True,
    )
    try:
        if not kill_after:
            assert process.wait(timeout=120) == 0
            return
        end = time.monotonic() + 120
        while not log.exists() or log.read_text().count("\n") < before + kill_after:
            assert process.poll() is None, "it ended before it was killed"
            assert time.monotonic() < end
            time.sleep(0.01)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()  # the driver alone: its processes must see by themselves that nobody wants their work
        process.wait(timeout=30)
        assert psutil.wait_procs(children, timeout=10)[1] == []
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_any_step_and_resumed_at_another_size(tmp_path: Path, seed: int) -> None:
    rows = write(tmp_path, [400, 150, 250])
    steps = 150  # more than an epoch
    with open_stream(tmp_path, 0) as stream:
        expected = take(stream, steps)
    rng = random.Random(seed)
    sizes = [(1, 0), (2, 2), (4, 1)] if seed else [(4, 2), (1, 1), (2, 0)]
    for i, (world, workers) in enumerate(sizes):
        run_and_kill(tmp_path, workers, world, steps, kill_after=rng.randint(6, 45) if i < 2 else 0)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {len(ranks) for _, ranks, _ in log} == {1, 2, 4}
    assert len(log) >= steps  # steps after the last state were done twice, and were the same
    assert {step for step, _, _ in log} == set(range(1, steps + 1))
    for step, ranks, seen in log:
        batch = expected[step - 1]
        assert seen == digest(batch.samples), step
        assert sorted(row for rank in ranks for row in rank) == sorted(rows_of([batch])), step
    assert len(rows) == 800


# ---------------------------------------------------------------------- what goes wrong


class Trouble(Numbers):
    """Something happens at row 60."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def __call__(self, rows: Sequence[Row]) -> list[Rendered]:
        if any(row.columns["messages"][0] == 60 for row in rows):
            if self.what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "hang":
                time.sleep(3600)
            if self.what == "refuse":
                raise DataError("row 60 is bad", hint="remove it")
            raise KeyError("sixty")
        return super().__call__(rows)


def trouble(folder: Path, what: str, **settings: object) -> SampleStream:
    values = {"workers": 2, "stream_above": 0, "shuffle": False, "deadline_s": 60, **settings}
    shards = Shards([str(folder / "shard-0.parquet")], ("messages",))
    return SampleStream(shards, Trouble(what), DataConfig.model_validate(values), batch_size=BATCH, seed=0)


def hurry(stream: SampleStream) -> None:
    stream.cfg = stream.cfg.model_copy(update={"deadline_s": 1.0})


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """More rows than are looked at beforehand, for ``trouble``."""
    monkeypatch.setattr("posttrain.data.stream.CHECK_ROWS", 16)
    write(tmp_path, [200])
    return tmp_path


BEFORE = 5
"""Batches before the task with row 60: rows 48 to 63, of which some are left out."""


def test_a_process_that_dies_is_named(large: Path) -> None:
    with trouble(large, "die") as stream:
        take(stream, BEFORE)
        with pytest.raises(WorkerError, match=r"tokenizer worker 1 \(process \d+\), at .*shard-0.parquet, row 48") as e:
            take(stream, 10)
        assert "died (exit code -9)" in e.value.message
        assert stream.position <= 48
        with pytest.raises(WorkerError, match="row 48"):  # it stays so
            stream.next()


def test_a_process_that_hangs_is_named(large: Path) -> None:
    with trouble(large, "hang", workers=3) as stream:
        take(stream, BEFORE)  # the processes have started
        hurry(stream)
        start = time.monotonic()
        with pytest.raises(DeadlineError, match=r"deadline_s = 1 s: waiting for tokenizer worker 0 \(process") as error:
            take(stream, 200)
        assert "row 48 and 15 more" in error.value.message
        assert time.monotonic() - start < 20
    assert time.monotonic() - start < 25  # and it is ended all the same


def test_a_process_that_is_stopped_is_named(data: tuple[Path, list[tuple[int, int]]]) -> None:
    before = set(psutil.Process().children())
    with open_stream(data[0], 1) as stream:
        take(stream, 1)
        hurry(stream)
        started = set(psutil.Process().children()) - before
        (worker,) = [p for p in started if "spawn_main" in " ".join(p.cmdline())]
        worker.suspend()
        with pytest.raises(DeadlineError, match=rf"tokenizer worker 0 \(process {worker.pid}\)"):
            take(stream, 200)


def test_a_bad_row_is_an_error_in_its_place(large: Path) -> None:
    for workers in (0, 1, 3):
        with trouble(large, "refuse", workers=workers) as stream:
            assert rows_of(take(stream, BEFORE))[-1] < 48
            with pytest.raises(DataError, match="row 60 is bad") as error:
                take(stream, 10)
            assert error.value.hint == "remove it"
            assert stream.position <= 48


def test_an_error_that_nobody_foresaw_names_the_process_and_the_row(large: Path) -> None:
    with (
        trouble(large, "raise") as stream,
        pytest.raises(WorkerError, match=r"tokenizer worker 1 .*, row 48 and 15 more failed: KeyError: 'sixty'"),
    ):
        take(stream, 200)


def test_a_render_that_cannot_be_sent_is_an_error(large: Path) -> None:
    cfg = DataConfig(stream_above=0, workers=1, deadline_s=30)
    shards = Shards([str(large / "shard-0.parquet")], ("messages",))
    with (
        SampleStream(shards, lambda rows: Numbers()(rows), cfg, batch_size=BATCH, seed=0) as stream,
        pytest.raises(WorkerError, match="cannot be sent to other processes") as error,
    ):
        stream.next()
    assert "data.workers = 0" in str(error.value.hint)


def test_leaving_ends_the_processes(data: tuple[Path, list[tuple[int, int]]]) -> None:
    before = set(psutil.Process().children())
    with open_stream(data[0], 2) as stream:
        take(stream, 3)
        workers = set(psutil.Process().children()) - before
        assert sum("spawn_main" in " ".join(p.cmdline()) for p in workers) == 2
    left = [p for p in workers if p.is_running() and "resource_tracker" not in " ".join(p.cmdline())]
    assert left == []


# ---------------------------------------------------------------------- memory


MEASURE = """
import re, sys
from pathlib import Path
from tests.helpers.stream_driver import open_stream
with open_stream(Path(sys.argv[1]), 0, shuffle_rows=int(sys.argv[2]), prefetch=2) as stream:
    for _ in range(int(sys.argv[3])):
        stream.next()
    print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 2**10)
"""


def peak_mib(folder: Path, shuffle_rows: int, steps: int) -> float:
    """Peak memory of a process that reads so many batches (``ru_maxrss`` would begin with that of its parent)."""
    command = [sys.executable, "-c", MEASURE, str(folder), str(shuffle_rows), str(steps)]
    env = os.environ | {"PYTHONPATH": str(REPO)}
    return float(subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=300).stdout)


@pytest.mark.slow
@pytest.mark.parametrize("group", [2_000, 200_000])
def test_memory_does_not_grow_with_the_data(tmp_path: Path, group: int) -> None:
    """400 MB of rows, in row groups of 4 MB and of 400 MB: what is in memory is the window."""
    schema = pa.schema({"messages": pa.list_(pa.int64()), "tools": pa.string()})
    rng = random.Random(0)
    texts = [rng.randbytes(1000).hex() for _ in range(1000)]
    with pq.ParquetWriter(tmp_path / "large.parquet", schema, use_dictionary=False) as writer:
        for start in range(0, 200_000, group):
            numbers = [[n, 5] for n in range(start, start + group)]
            text = [texts[n % 1000] for n in range(group)]
            writer.write_table(pa.table({"messages": numbers, "tools": text}, schema=schema), row_group_size=group)
    write(tmp_path / "small", [300])
    base = peak_mib(tmp_path / "small", 64, 10)
    assert peak_mib(tmp_path, 2_000, 5_000) - base < 120
