"""The search for garbage in cycles is rare in a body, and as it was after it, also where the body fails."""

import gc

import pytest

from posttrain.core.cycles import RARE, rare_cycle_search


def test_it_is_rare_in_the_body_only():
    before = gc.get_threshold()
    gc.set_threshold(701, 11, 12)
    try:
        with pytest.raises(KeyError), rare_cycle_search():
            assert gc.get_threshold() == RARE
            raise KeyError
        assert gc.get_threshold() == (701, 11, 12)
    finally:
        gc.set_threshold(*before)
