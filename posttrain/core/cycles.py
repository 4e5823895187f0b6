"""Python's search for garbage in cycles of references, made rare where it finds little."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARE = (100_000, 20, 100)
"""Thresholds of ``gc.set_threshold``."""
USUAL = gc.get_threshold()
"""Python's own: (700, 10, 10)"""


@contextmanager
def rare_cycle_search() -> Iterator[None]:
    """Search seldom within the body.

    Imports and rows of data are millions of small objects without cycles, and looking through all of them again and
    again takes a sixth to a quarter of the time. Not for a whole run of a worker: what waits to be found may hold
    memory of a GPU.
    """
    usual = gc.get_threshold()
    gc.set_threshold(*RARE)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
