"""The lock that keeps two processes from using the same run folder."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path
from typing import IO

from posttrain.core.errors import ConfigError
from posttrain.core.files import writing


class RunLock:
    """A run folder's file lock, held as long as the process that uses it lives, on any host. It belongs to the process
    and not to the open file, so child processes do not hold it."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    @classmethod
    def take(cls, folder: Path) -> RunLock:
        """Lock a run's folder. Raises ``ConfigError`` where another process has it, or it cannot be written to,
        and ``RunError`` where the disk is full."""
        with writing(folder, hint="choose a place: --set run.dir=DIR"):
            file = (folder / ".lock").open("a")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                file.close()
                raise ConfigError(f"run {folder} is in use", hint="wait for it, or give --name NAME") from error
            # On a file system without locks only the process id in run.json protects the folder.
        return cls(file)

    def release(self) -> None:
        self._file.close()
