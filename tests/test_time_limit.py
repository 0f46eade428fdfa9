"""Polite stops: by the clock as by a signal."""

import signal
import time

import pytest

from m3d.runtime import stop_politely, time_limit


def test_a_limit_asks_to_stop_when_it_has_passed():
    with time_limit(0.2), stop_politely() as asked:
        assert not asked.is_set()
        assert asked.wait(5)


def test_a_limit_that_has_passed_asks_at_once():
    with time_limit(0.0), stop_politely() as asked:
        assert asked.is_set()


def test_one_limit_covers_all_that_stops_within_it():
    with time_limit(0.2):
        with stop_politely() as first:
            pass
        time.sleep(0.3)
        with stop_politely() as second:
            assert second.is_set()
        assert not first.is_set()  # it was over before
    with stop_politely() as after:
        assert not after.is_set()


def test_without_a_limit_nothing_changes():
    before = signal.getsignal(signal.SIGTERM)
    with time_limit(None), stop_politely() as asked:
        assert not asked.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert asked.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_first_signal_after_a_limit_is_still_polite():
    with time_limit(0.0), stop_politely() as asked:
        assert asked.is_set()
        signal.raise_signal(signal.SIGINT)
