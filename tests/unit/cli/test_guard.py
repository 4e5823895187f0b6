"""Signals that come up where Python ignores exceptions."""

from __future__ import annotations

import signal
import sys
import threading

import pytest
import typer

from posttrain.cli.guard import guarded


class Finalized:
    """Receives a signal in its finalizer."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_in_a_finalizer_stops_the_command(number: signal.Signals, code: int, goes_on: bool) -> None:
    before = sys.unraisablehook
    ended = []

    @guarded
    def command() -> None:
        Finalized(number)
        if goes_on:
            ended.append(threading.Event().wait(60))

    with pytest.raises(typer.Exit) as stopped:
        command()
    assert (stopped.value.exit_code, ended) == (code, [])
    assert sys.unraisablehook is before


def test_other_errors_of_finalizers_are_told_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: told.append(ignored.exc_type))

    class Broken:
        def __del__(self) -> None:
            raise ValueError

    guarded(lambda: Broken() and None)()
    assert told == [ValueError]
