"""Raylets start this program instead of Ray's ``setup_worker.py``, with the same arguments: it has the fork server
(``forkserver.py``) start the worker, and where that cannot be, becomes Ray's program. It imports little, since each
worker waits for it."""

import json
import os
import signal
import socket
import sys
from pathlib import Path

SOCKET = "POSTTRAIN_FORK_SERVER"
"""Variable with the path of the server's socket."""
_DEADLINE_S = 30.0
"""Longest wait for the server, which may be importing still. Ray gives up a worker after 60 s."""
_CONTEXT = "--serialized-runtime-env-context="
_LANGUAGE = "--language="


def plain_command(arguments: list[str]) -> list[str] | None:
    """Return a worker's program and its arguments; None where Ray wants more than to run it, for example variables of
    its own or another interpreter."""
    own = (_CONTEXT, _LANGUAGE)
    command = [argument for argument in arguments if not argument.startswith(own)]
    for argument in arguments:
        if argument.startswith(_LANGUAGE) and argument != f"{_LANGUAGE}PYTHON":
            return None
        if argument.startswith(_CONTEXT):
            context = json.loads(argument.removeprefix(_CONTEXT))
            if context.pop("py_executable", sys.executable) != sys.executable or any(context.values()):
                return None
    return command if command and command[0].endswith("default_worker.py") else None


def forked(command: list[str], address: str) -> bool:
    """Have the server fork a process that runs ``command`` with the environment, folder, signal mask, process group
    and standard streams of this one. Returns whether it has."""
    mask = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    surroundings = {"environment": dict(os.environ), "folder": os.getcwd(), "mask": mask, "group": os.getpgrp()}
    request = json.dumps({"command": command, **surroundings})
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_DEADLINE_S)
            connection.connect(address)
            socket.send_fds(connection, [b"\n"], [0, 1, 2])
            connection.sendall(request.encode())
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1) == b"\n"
    except OSError:
        return False


def main() -> None:
    arguments = sys.argv[1:]
    command, address = plain_command(arguments), os.environ.get(SOCKET)
    if command is not None and address is not None and forked(command, address):
        return
    program = next(argument for argument in arguments if argument.endswith("default_worker.py"))
    os.execv(sys.executable, [sys.executable, str(Path(program).with_name("setup_worker.py")), *arguments])


if __name__ == "__main__":
    main()
