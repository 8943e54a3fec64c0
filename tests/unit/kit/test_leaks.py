"""The leak check sees what it is for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from tests.kit.leaks import no_leaks


def test_nothing_left_is_no_leak() -> None:
    with no_leaks(within_s=5):
        reader, writer = os.pipe()
        os.close(reader)
        os.close(writer)


def test_a_child_that_lives_on_is_named() -> None:
    child = None
    try:
        with pytest.raises(AssertionError, match="process"), no_leaks(within_s=0):
            child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1)
    finally:
        assert child is not None
        child.communicate()


def test_an_open_descriptor_is_named() -> None:
    ends: tuple[int, ...] = ()
    try:
        with pytest.raises(AssertionError, match="descriptor"), no_leaks(within_s=0):
            ends = os.pipe()
    finally:
        for end in ends:
            os.close(end)


def test_a_thread_is_named_when_threads_count() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    try:
        with (
            pytest.raises(AssertionError, match="thread"),
            no_leaks(within_s=0, threads=True),
        ):
            thread.start()
    finally:
        done.set()
        thread.join()


def test_what_was_there_before_is_not_the_tests_own() -> None:
    ends = os.pipe()
    try:
        with no_leaks(within_s=0):
            pass
    finally:
        for end in ends:
            os.close(end)
