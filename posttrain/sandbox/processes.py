"""What the kernel tells about the processes of a sandbox. Stdlib only: the zygote imports this file by its path.

``proc(5)``; the caller is process 1 of their namespace, and none of them.
"""

from __future__ import annotations

import os

_DESCRIPTOR_BYTES = 256 << 10
"""What an open descriptor counts as memory: the most that a pipe or a socket buffers with the size it starts with."""
_EXITING = 0x4
"""PF_EXITING, of the flags of a task."""


class Processes:
    """All processes of the namespace but its first.

    Args:
        proc: descriptor of its /proc.
    """

    def __init__(self, proc: int) -> None:
        self._proc = proc

    def hold_more_than(self, limit: int) -> bool:
        """Return whether they hold more bytes together: pages, also those in swap, a shared one counted once; and what
        the kernel keeps for their descriptors."""
        pids = self._pids()
        left = limit - _DESCRIPTOR_BYTES * sum(len(self._names(f"{pid}/fd")) for pid in pids)
        # The resident sizes are quick to read, and never less than the proportional ones.
        resident = sum(self._kilobytes(f"{pid}/status", "VmRSS:", "VmSwap:") for pid in pids)
        if resident << 10 <= left:
            return False
        return sum(self._kilobytes(f"{pid}/smaps_rollup", "Pss:", "SwapPss:") for pid in pids) << 10 > left

    def stopped(self) -> bool:
        """Return whether all that were sent SIGSTOP have stopped, and nothing can wake them.

        A process that is about to end, which no signal stops, can wake others with its end: the kernel sends SIGCONT to
        a stopped process group when its last relative outside has gone.
        """
        return not any(
            _may_wake(text)
            for pid in self._pids()
            for task in self._names(f"{pid}/task")
            if (text := self._text(f"{pid}/task/{task}/stat"))
        )

    def _pids(self) -> list[str]:
        return [name for name in os.listdir(self._proc) if name.isdigit() and name != "1"]

    def _kilobytes(self, file: str, *names: str) -> int:
        """The sum of some lines of a file that says ``NAME: NUMBER kB``."""
        lines = (line.split() for line in self._text(file).splitlines())
        return sum(int(words[1]) for words in lines if words[0] in names)

    def _text(self, file: str) -> str:
        """A file of /proc; empty where its process has ended."""
        try:
            fd = os.open(file, os.O_RDONLY, dir_fd=self._proc)
            try:
                return os.read(fd, 1 << 14).decode("utf-8", "replace")
            finally:
                os.close(fd)
        except OSError:
            return ""

    def _names(self, folder: str) -> list[str]:
        """The names in a folder of /proc; none where its process has ended."""
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
            try:
                return os.listdir(fd)
            finally:
                os.close(fd)
        except OSError:
            return []


def _may_wake(stat: str) -> bool:
    """Return whether a thread that was sent SIGSTOP still runs, or is ending. One that waits in the kernel stops on its
    way out."""
    words = stat.rpartition(")")[2].split()
    state, exiting = words[0], int(words[6]) & _EXITING
    return state not in "TtZX" and (state != "D" or bool(exiting))
