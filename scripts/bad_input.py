"""Try bad inputs against every command, as processes of their own, and check what a person would see.

    python scripts/bad_input.py                    all cases: a table of those that failed
    python scripts/bad_input.py --short            one in four, what CI runs
    python scripts/bad_input.py --only sft:model   cases whose name contains this text

Each case is a command line in a workspace with small data, models and runs (``bad_input_cases.py``). Checked are the
exit code, the message, a hint where the code is 2, that there is no traceback, that no file in the workspace was
changed, made or removed, and that nothing stays in the folder for temporary files or in /dev/shm. A full disk is a
small tmpfs mount, for which the script must run as root; as an ordinary user it skips these cases, and says so.

All libraries are imported once, and each case runs in a fork of this process: 150 cases take minutes and not an hour.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bad_input_cases import Case, all_cases, make_workspace

DEADLINE_S = 120.0
"""Longest life of one command; the longest of these trains for two steps."""
TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Done:
    """What became of one command."""

    code: int
    output: str
    """Stdout and stderr, as they came."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="one case in four")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--show", action="store_true", help="print the output of every case")
    args = parser.parse_args()
    _import_everything()
    # Not TemporaryDirectory: each fork would remove it at its exit.
    root = Path(tempfile.mkdtemp(prefix="bad-input-"))
    try:
        _prepare_environment(root)
        make_workspace(root, run_command)
        cases = [case for case in all_cases(root) if args.only in case.name]
        if args.short:
            cases = [case for index, case in enumerate(cases) if index % 4 == 0 or case.always]
        failed = _run_all(cases, root, args.show)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return 1 if failed or not cases else 0


def _run_all(cases: list[Case], root: Path, show: bool) -> int:
    begin = time.monotonic()
    failed = skipped = 0
    for case in cases:
        if case.disk_kb is not None and os.geteuid() != 0:
            skipped += 1
            continue
        done, faults = try_case(case, root)
        failed += bool(faults)
        if faults or show:
            print(f"{'FAILED' if faults else 'ok'}  {case.name}: posttrain {case.words}")
            print("".join(f"    {fault}\n" for fault in faults), end="")
            print("".join(f"    | {line}\n" for line in done.output.strip().splitlines()[-12:]), flush=True)
    if skipped:
        print(f"skipped {skipped} cases of full disks: they need root")
    # The line that test runners' closing lines look like.
    print(f"bad input, {time.monotonic() - begin:.0f} s: {len(cases) - failed - skipped} passed, {failed} failed")
    return failed


def try_case(case: Case, root: Path) -> tuple[Done, list[str]]:
    """Run one case, and return what it printed and what is wrong with that."""
    work = root / "work"
    with _small_disk(work / "disk", case.disk_kb):
        before, shared = _tree(work), _shared_memory()
        done = run_command(shlex.split(case.words), root, case.act)
        faults = list(_faults(case, done))
        after = _tree(work)
        changed = sorted(name for name in _changes(before, after) if not re.fullmatch(case.leaves, name))
        _remove(work, after.keys() - before.keys())  # the next case finds what this one found
        if changed:
            faults.append(f"changed: {', '.join(changed[:5])}")
        left = sorted(_shared_memory() - shared)
        left += [str(path) for path in (root / "tmp").iterdir() if path.name != "ray"]  # Ray keeps its logs there
        if left:
            faults.append(f"left over: {', '.join(left[:5])}")
    return done, faults


def _faults(case: Case, done: Done) -> Iterator[str]:
    text = " ".join(done.output.split())
    if done.code != case.code:
        yield f"exit code {done.code}, and {case.code} is expected"
    if TRACEBACK in done.output:
        yield "a traceback"
    if not re.search(case.message, text):
        yield f"no message like {case.message!r}"
    hints = [line for line in done.output.splitlines() if line.startswith("hint: ") or "Try 'posttrain" in line]
    if case.code == 2 and not hints:
        yield "no hint"
    elif not re.search(case.hint, " ".join(hints)):
        yield f"no hint like {case.hint!r}"


def run_command(words: list[str], root: Path, act: Callable[[int, Path], None] | None = None) -> Done:
    """Run ``posttrain WORDS`` in a fork of this process, in the workspace.

    Args:
        act: gets its process id and the file that it writes to, and may send signals.
    """
    log = root / "output"
    log.write_bytes(b"")  # ``act`` must not find what the command before wrote
    pid = os.fork()
    if pid == 0:
        _be_the_command(words, root / "work", log)
    if act is not None:
        act(pid, log)
    code = _wait(pid)
    return Done(code, log.read_text(errors="replace"))


def _be_the_command(words: list[str], work: Path, log: Path) -> None:
    code = 70
    try:
        os.setsid()
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, null), (1, fd), (2, fd)):
            os.dup2(source, target)
        os.chdir(work)
        sys.argv = ["posttrain", *words]
        from posttrain.cli import main as command_line

        command_line()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # what Python itself would print of it
        traceback.print_exc()
        code = 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int) -> int:
    """Return the exit code, or minus the signal's number; at the deadline the whole session is killed."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextlib.contextmanager
def _small_disk(folder: Path, size_kb: int | None) -> Iterator[None]:
    """Mount a tmpfs of this size at ``folder``, for one case."""
    if size_kb is None:
        yield
        return
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_kb}k", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


def _tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file, and the folders, by path."""
    found = {}
    for path in folder.rglob("*"):
        state = path.lstat()
        found[str(path.relative_to(folder))] = (-1, 0) if path.is_dir() else (state.st_size, state.st_mtime_ns)
    return found


def _changes(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def _remove(folder: Path, names: set[str]) -> None:
    for name in sorted(names, reverse=True):  # what lies in a folder comes before it
        path = folder / name
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def _shared_memory() -> set[str]:
    return {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.startswith("posttrain")}


def _prepare_environment(root: Path) -> None:
    (root / "tmp").mkdir()
    (root / "work").mkdir()
    os.environ |= {
        "TMPDIR": str(root / "tmp"),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "300",
        "NO_COLOR": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
    }  # fmt: skip
    sys.dont_write_bytecode = True
    tempfile.tempdir = None


def _import_everything() -> None:
    import pandas  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import ray  # noqa: F401
    import torch
    import transformers.models.auto.modeling_auto
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    import posttrain.evaluation.command
    import posttrain.generation.command
    import posttrain.merge_ckpt
    import posttrain.preference.command
    import posttrain.prep.command
    import posttrain.rl.command
    import posttrain.sft.command  # noqa: F401

    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
