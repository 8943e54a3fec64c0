"""The leak check sees what it is for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import psutil
import pytest

from tests.kit.eventually import eventually
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


def start_detached(stdin: int) -> int:
    """Start a process that lives until `stdin` ends and is no descendant of ours."""
    stays = "import os, sys; os.setsid(); print(os.getpid(), flush=True); input()"
    child = (
        "import subprocess, sys\n"
        f"stays = subprocess.Popen([sys.executable, '-c', {stays!r}], stdout=-1)\n"
        "print(stays.stdout.readline().decode(), flush=True)\n"
        "import os; os._exit(0)"
    )
    command = [sys.executable, "-c", child]
    done = subprocess.run(command, stdin=stdin, stdout=-1, text=True, check=True)
    return int(done.stdout)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_process_that_detached_itself_is_named() -> None:
    reader, writer = os.pipe()
    pid = 0
    try:
        with pytest.raises(AssertionError, match="process"), no_leaks(within_s=0):
            pid = start_detached(reader)
    finally:
        os.close(writer)
        os.close(reader)
    eventually(lambda: gone(pid), within_s=10)


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
