"""Runs a source as ``__main__``, as Python runs a file or as its interactive interpreter would.

Stdlib only, and nothing of ours: the zygote imports this file by its path, and a remote service gets it as the head of
a program whose last value is to be shown.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import gc
import linecache
import os
import sys
import threading
import traceback
import types
from typing import Any, NoReturn


def new_main(name: str) -> types.ModuleType:
    """A fresh ``__main__`` of a program whose file is called ``name``."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __file__=name)
    sys.modules["__main__"] = module
    sys.argv = [name]
    return module


def execute(source: str, module: types.ModuleType, name: str, *, echo: bool = False) -> int:
    """Run a source in a module; its exit code. An exception is shown as Python shows it, from the source's first line.

    ``echo``: where the last statement is an expression, print its value unless it is None.
    """
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    try:
        if echo:
            _execute_and_echo(source, module, name)
        else:
            exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        _show(error)
        return 1
    return 0


def finish(code: int) -> NoReturn:
    """End as the interpreter would (threads, exit functions, what only the program holds, buffers), without the
    milliseconds of taking the rest apart."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter's own end does
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
        code = code or 1
    code = _flush(sys.stdout, sys.stderr) or code
    sys.modules.pop("__main__", None)
    gc.collect()  # files that the program left open are written
    _flush(sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    os._exit(code & 0xFF)


def _flush(*streams: Any) -> int:
    """Empty the buffers; 1 where one cannot be written."""
    code = 0
    for stream in streams:
        try:
            if not getattr(stream, "closed", False):
                stream.flush()
        except (OSError, ValueError, AttributeError):
            code = 1
    return code


def _execute_and_echo(source: str, module: types.ModuleType, name: str) -> None:
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), module.__dict__)
    if last is not None:  # `single` hands values to sys.displayhook, which prints them
        exec(compile(ast.Interactive([last]), name, "single", dont_inherit=True), module.__dict__)


def _show(error: BaseException) -> None:
    own = error.__traceback__
    while own is not None and own.tb_frame.f_code.co_filename == __file__:
        own = own.tb_next
    traceback.print_exception(type(error), error, own)
