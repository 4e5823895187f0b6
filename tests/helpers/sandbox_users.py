"""A sandbox that another user opened, for tests that run as root: real root is exempt from checks that hold others.

The other user's process reads requests from stdin and writes results to stdout, one JSON line each.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from posttrain.config import SandboxConfig
from posttrain.sandbox.base import RunResult
from posttrain.sandbox.local import LocalSandbox

ORDINARY = 54321
"""A user and group that own nothing."""
_CHECKOUT = Path(__file__).resolve().parents[2]


class Unavailable(Exception):
    """Why no process can be started as another user."""


class OthersSandbox:
    """``run`` and, in one session, ``cell``, of a sandbox that an ordinary user opened. Root only."""

    def __init__(self, scratch: Path, **config):
        if os.geteuid() != 0:
            raise Unavailable("only root can become another user")
        missing = [name for name in ("unshare", "setpriv", "mount") if shutil.which(name) is None]
        if missing:
            raise Unavailable(f"{', '.join(missing)} (util-linux) is not installed")
        command = f"from tests.helpers.sandbox_users import serve; serve({json.dumps(config)!r})"
        self._process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-ec", _as_ordinary(scratch), "sh", sys.executable, "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=_CHECKOUT,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(_CHECKOUT), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        if self._process.stdout.readline() != "ready\n":
            said = self._process.communicate()[1]
            raise Unavailable(f"an ordinary user's process does not start here: {said.strip()[-300:]}")

    def run(self, code, stdin="", *, deadline_s=5.0):
        return self._ask("run", code, stdin, deadline_s)

    def cell(self, code, *, deadline_s=5.0):
        return self._ask("cell", code, "", deadline_s)

    def close(self):
        self._process.communicate(timeout=30.0)

    def _ask(self, *request):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self._process.communicate()[1]
        return RunResult(**json.loads(answer))


class OwnSandbox:
    """The same of a sandbox of this process."""

    def __init__(self, **config):
        self._sandbox = LocalSandbox(SandboxConfig(**config))
        self._session = self._sandbox.session()

    def run(self, code, stdin="", *, deadline_s=5.0):
        self._session.close()
        return self._sandbox.run(code, stdin, deadline_s=deadline_s)

    def cell(self, code, *, deadline_s=5.0):
        return self._session.run(code, deadline_s=deadline_s)

    def close(self):
        self._sandbox.close()


def serve(config):
    """Body of the other user's process."""
    sandbox = OwnSandbox(**json.loads(config))
    print("ready", flush=True)
    for line in sys.stdin:
        kind, code, stdin, deadline_s = json.loads(line)
        if kind == "run":
            result = sandbox.run(code, stdin, deadline_s=deadline_s)
        else:
            result = sandbox.cell(code, deadline_s=deadline_s)
        print(json.dumps(asdict(result)), flush=True)
    sandbox.close()


def _as_ordinary(scratch):
    """A script that becomes the ordinary user, in a mount namespace of its own. Python and the checkout may lie in
    folders that only root can enter: these are covered by others that show nothing else."""
    needed = {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), _CHECKOUT}
    covers = {path: cover for path in sorted(needed) if (cover := _closed_parent(path)) is not None}
    stash = {path: scratch / str(number) for number, path in enumerate(covers)}
    steps = [f"mkdir -p '{stash[path]}'; mount --rbind '{path}' '{stash[path]}'" for path in covers]
    steps += [f"mount -t tmpfs -o mode=755 none '{cover}'" for cover in sorted(set(covers.values()))]
    steps += [f"mkdir -p '{path}'; mount --rbind '{stash[path]}' '{path}'" for path in covers]
    steps.append(f'exec setpriv --reuid={ORDINARY} --regid={ORDINARY} --clear-groups "$@"')
    return "\n".join(steps)


def _closed_parent(path):
    """The outermost folder above ``path`` that others may not enter, or None."""
    return next((parent for parent in reversed(path.parents) if not parent.stat().st_mode & 0o001), None)
