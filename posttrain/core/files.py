"""Files and folders that are there whole or not at all, and what a person is told when one cannot be written."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from posttrain.core.errors import ConfigError, explained

P = TypeVar("P", str, Path, str | Path)


@contextmanager
def writing(path: str | Path, *, hint: str | None = None) -> Iterator[None]:
    """Turn what the system says against writing ``path`` into one message with a hint.

    Args:
        hint: what to do where the path is at fault; None: the general hint for the reason.

    Raises:
        RunError: the disk is full, over its quota or broken.
        ConfigError: the path cannot be written to.
    """
    try:
        yield
    except Exception as error:
        told = explained(error, path, hint=hint) if _is_about(error, Path(path)) else None
        if told is None:
            raise
        raise told from error


def _is_about(error: Exception, path: Path) -> bool:
    """Return whether an error that names a file may come from writing ``path``, and not from reading another one."""
    named = getattr(error, "filename", None)
    if not isinstance(named, str | bytes):
        return True
    file = Path(os.fsdecode(named))
    return file.is_relative_to(path.parent) or path.is_relative_to(file)


def check_new(path: Path, option: str, *, overwrite: bool) -> None:
    """Raise ``ConfigError`` where the file that ``option`` names is a folder, exists and is not to be replaced, or
    could not be made where it is to be. A command calls it before its work, so that nothing is computed for a file
    that cannot be written."""
    with writing(path, hint=f"choose another {option}"):
        if path.is_dir():
            raise ConfigError(f"{path} is a folder", hint=f"give another {option}: it is the name of a file")
        if path.exists() and not overwrite:
            raise ConfigError(f"{path} exists", hint=f"give --overwrite, or another {option}")
        parent = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
        if not parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "", str(parent))
        if not os.access(parent, os.W_OK | os.X_OK):
            read_only = os.statvfs(parent).f_flag & os.ST_RDONLY
            raise OSError(errno.EROFS if read_only else errno.EACCES, "", str(parent))


def refuse_inputs(out: str | Path, option: str, inputs: Iterable[str | Path]) -> None:
    """Raise ``ConfigError`` where the file or folder that ``option`` names is one of those that the command reads, or
    holds one of them: writing it would destroy what was given."""
    if (path := first_within(out, inputs)) is not None:
        raise ConfigError(
            f"{option} {out} would replace {path}, which the command reads", hint=f"give another {option}"
        )


def first_within(place: str | Path, paths: Iterable[P]) -> P | None:
    """Return the first of ``paths`` that is ``place``, or lies in it, whatever links and ``..`` lead there; None: none
    does."""
    real = os.path.realpath(place)
    return next((path for path in paths if Path(os.path.realpath(path)).is_relative_to(real)), None)


@contextmanager
def replacing(path: Path, *, hint: str | None = None, synced: bool = False) -> Iterator[Path]:
    """Give a name beside ``path`` to write a file or a folder to, which is then renamed: a reader finds the old one or
    the new one, and of several writers the last one wins. On failure nothing is left, ``path`` is as it was, and so
    is the folder that it was to be in.

    Args:
        hint: as for ``writing``.
        synced: bring the file to the disk before it is renamed.

    Raises:
        RunError, ConfigError: as ``writing``.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    made = not path.parent.exists()
    with writing(path, hint=hint):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            if synced:
                sync(temporary)
            if temporary.is_dir() and path.is_dir():
                shutil.rmtree(path)
            os.replace(temporary, path)
        except BaseException:
            remove(temporary)
            if made:
                with contextlib.suppress(OSError):  # others may have put something into it
                    path.parent.rmdir()
            raise


def write_bytes(path: Path, content: bytes, *, hint: str | None = None, synced: bool = False) -> None:
    """Write a file as ``replacing`` does."""
    with replacing(path, hint=hint, synced=synced) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, text: str, *, hint: str | None = None, synced: bool = False) -> None:
    """Write text as UTF-8, as ``replacing`` does."""
    write_bytes(path, text.encode("utf-8"), hint=hint, synced=synced)


def read_object(path: Path, *, hint: str) -> dict[str, Any]:
    """Return the JSON object that a file holds. Raises ``ConfigError`` where it cannot be read or holds something
    else."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint=hint) from error
    if not isinstance(read, dict):
        raise ConfigError(f"{path} does not hold a JSON object", hint=hint)
    return read


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file or a folder with all that is in it, as far as the system lets us."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
