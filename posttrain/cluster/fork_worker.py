"""Raylets start this program instead of Ray's ``setup_worker.py``, with the same arguments: it has the fork server
(``forkserver.py``) start the worker, or a process that waits for this become it (``waiting_worker.py``), and where
neither can be, becomes Ray's program. It imports little, since each worker waits for it."""

import json
import os
import signal
import socket
import sys
from pathlib import Path

SOCKET = "POSTTRAIN_FORK_SERVER"
"""Variable with the path of the server's socket."""
WAITING = "POSTTRAIN_WAITING_WORKER"
"""Variable of a worker's own, with the path of the socket of the process that is to become it."""
_DEADLINE_S = 40.0
"""Longest wait for that process, which may be importing still. Ray gives up a worker after 60 s."""
_CONTEXT = "--serialized-runtime-env-context="
_LANGUAGE = "--language="


def plain_command(arguments: list[str]) -> tuple[list[str], dict[str, str]] | None:
    """Return a worker's program with its arguments, and the variables of its own; None where Ray wants more than to
    run it, for example by another interpreter."""
    own = (_CONTEXT, _LANGUAGE)
    command = [argument for argument in arguments if not argument.startswith(own)]
    variables: dict[str, str] = {}
    for argument in arguments:
        if argument.startswith(_LANGUAGE) and argument != f"{_LANGUAGE}PYTHON":
            return None
        if argument.startswith(_CONTEXT):
            context = json.loads(argument.removeprefix(_CONTEXT))
            variables = context.pop("env_vars", None) or {}
            if context.pop("py_executable", sys.executable) != sys.executable or any(context.values()):
                return None
    return (command, variables) if command and command[0].endswith("default_worker.py") else None


def handed_over(command: list[str], address: str, variables: dict[str, str]) -> bool:
    """Have another process run ``command`` with the folder, signal mask, process group, standard streams and
    environment of this one, and these ``variables``. Returns whether it does."""
    mask = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    surroundings = {"environment": os.environ | variables, "folder": os.getcwd(), "mask": mask, "group": os.getpgrp()}
    request = json.dumps({"command": command, **surroundings})
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_DEADLINE_S)
            connection.connect(address)
            socket.send_fds(connection, [b"\n"], [0, 1, 2])
            connection.sendall(request.encode())
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(4096)
    except OSError as error:
        answer = str(error).encode()
    if answer != b"\n":
        print(f"A worker starts anew: {answer.decode() or 'no other process became it'}", file=sys.stderr)
    return answer == b"\n"


def main() -> None:
    arguments = sys.argv[1:]
    if (plain := plain_command(arguments)) is not None:
        command, variables = plain
        address = variables.get(WAITING) if variables else os.environ.get(SOCKET)
        if address and handed_over(command, address, variables):
            return
    program = next(argument for argument in arguments if argument.endswith("default_worker.py"))
    os.execv(sys.executable, [sys.executable, str(Path(program).with_name("setup_worker.py")), *arguments])


if __name__ == "__main__":
    main()
