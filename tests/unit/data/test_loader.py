import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import UserError
from posttrain.data.loader import INTERLEAVE, BatchOrder, WindowOrder, total_steps


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 5), st.booleans())
def test_every_epoch_has_every_row_once(rows, batch_size, seed, shuffle):
    order = BatchOrder(rows, batch_size, seed, shuffle)
    batches = [order.next() for _ in range(3 * rows)]
    assert {len(b) for b in batches} == {batch_size}
    stream = list(itertools.chain.from_iterable(batches))
    for epoch in range(3):
        assert sorted(stream[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 20))
def test_a_restored_order_goes_on_where_it_stopped(rows, batch_size, taken):
    order = BatchOrder(rows, batch_size, seed=3)
    for _ in range(taken):
        order.next()
    state = order.state()
    again = BatchOrder(rows, batch_size, seed=3)
    again.restore(state)
    assert [again.next() for _ in range(5)] == [order.next() for _ in range(5)]


def test_seeds_and_epochs_have_orders_of_their_own():
    def epochs(seed):
        order = BatchOrder(50, 50, seed)
        return [tuple(order.next()) for _ in range(3)]

    assert epochs(0) == epochs(0)
    assert len({*epochs(0), *epochs(1)}) == 6
    assert tuple(range(50)) not in epochs(0)


def test_without_shuffle_rows_come_in_order():
    order = BatchOrder(5, 3, seed=0, shuffle=False)
    assert [order.next() for _ in range(3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_data_that_changed_since_the_checkpoint_is_refused():
    state = BatchOrder(100, 10, seed=0).state()
    with pytest.raises(UserError, match=r"100.*99"):
        BatchOrder(99, 10, seed=0).restore(state)


@pytest.mark.parametrize(
    ("rows", "batch", "epochs", "steps", "expected"),
    [
        (100, 10, 1, None, 10),
        (100, 10, 3, None, 30),
        (104, 10, 1, None, 10),
        (106, 10, 1, None, 11),
        (3, 10, 1, None, 1),
        (100, 10, 3, 7, 7),
    ],
)
def test_total_steps(rows, batch, epochs, steps, expected):
    assert total_steps(rows, batch, epochs, steps) == expected


# ---------------------------------------------------------------------- windows


def rows_from(order, position, count):
    """(group, row) of so many rows from a position on, and the most rows of one window."""
    rows, largest = [], 0
    for window, skip in order.windows(position):
        laid = [(p.group, i) for p in window.pieces for i in range(p.start, p.stop)]
        largest = max(largest, len(laid))
        rows += [laid[at] for at in window.order.tolist()][skip:]
        if len(rows) >= count:
            return rows[:count], largest
    raise AssertionError("an endless order ended")


SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=25)


@given(SIZES, st.integers(1, 60), st.integers(0, 3), st.booleans())
def test_windows_hold_every_row_once_an_epoch(sizes, window, seed, shuffle):
    order = WindowOrder(sizes, window, seed, shuffle)
    rows, largest = rows_from(order, 0, 2 * order.rows)
    everything = [(group, i) for group, size in enumerate(sizes) for i in range(size)]
    assert sorted(rows[: order.rows]) == sorted(rows[order.rows :]) == everything
    assert largest <= window
    if not shuffle:
        assert rows == everything * 2


@given(SIZES, st.integers(1, 60), st.integers(0, 3), st.integers(0, 700))
def test_windows_can_be_entered_anywhere(sizes, window, seed, position):
    order = WindowOrder(sizes, window, seed)
    start = position // order.rows * order.rows  # of its epoch
    from_start, _ = rows_from(order, start, position - start + 50)
    assert rows_from(WindowOrder(sizes, window, seed), position, 50)[0] == from_start[position - start :]


def test_few_row_groups_are_open_at_once():
    """A reader holds a decoder for each group that it is in the middle of."""
    order = WindowOrder([100] * 40, 64, seed=0)
    left = dict.fromkeys(range(40), 100)
    for window, _ in itertools.islice(order.windows(0), -(-order.rows // 64)):
        for piece in window.pieces:
            assert piece.start == 100 - left[piece.group]  # in ascending order
            left[piece.group] -= piece.stop - piece.start
            assert sum(0 < n < 100 for n in left.values()) <= INTERLEAVE + 1
    assert not any(left.values())
