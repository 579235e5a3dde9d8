"""What Ctrl-C and SIGTERM do, by real signals."""

from __future__ import annotations

import signal
import threading

import pytest

from flexray.stopping import SIGNALS, StopRequest


@pytest.mark.parametrize("number", SIGNALS)
def test_before_steps_run_a_signal_ends_at_once(number):
    before = [signal.getsignal(n) for n in SIGNALS]
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        signal.raise_signal(number)
    assert not stop.requested
    assert [signal.getsignal(n) for n in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_the_second_ends_and_the_third_does_not_disturb(number):
    heard = []
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        stop.heard = lambda: heard.append(stop.requested)
        signal.raise_signal(number)
        assert stop.requested and heard == [True]
        try:
            signal.raise_signal(number)
        finally:
            for each in SIGNALS:
                signal.raise_signal(each)  # the clean-up goes on
    assert heard == [True]


def test_a_signal_while_a_line_is_being_printed_asks_all_the_same():
    def heard():
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    with StopRequest() as stop:
        stop.heard = heard
        signal.raise_signal(signal.SIGINT)
    assert stop.requested


def test_outside_the_main_thread_only_a_request_stops():
    before = [signal.getsignal(n) for n in SIGNALS]
    seen = []

    def run():
        with StopRequest() as stop:
            seen.append([signal.getsignal(n) for n in SIGNALS])
            stop.request()
            seen.append(stop.requested)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before, True]
