"""A signal ends a run after its step, or at once where nothing is to be saved."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from mtuner_jax.training import stopping

# The main thread stays in C code, where Python's own handlers would not run.
PROGRAM = """
    import logging, sys, time
    import numpy as np
    from mtuner_jax.training import stopping

    logging.basicConfig(format="%(message)s")
    busy = np.random.default_rng(0).random(60_000_000)
    with stopping.watched() as stop:
        if sys.argv[1] == "deferred":
            stop.defer()
        print("ready", flush=True)
        while True:
            np.sort(busy)
"""


def start(kind):
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), kind]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", stopping.SIGNALS)
def test_before_there_is_anything_to_save_a_signal_ends_the_process_with_one_line(
    number,
):
    process = start("at once")
    began = time.monotonic()
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == stopping.STOPPED
    assert time.monotonic() - began < 2
    assert told.splitlines() == [
        f"{signal.Signals(number).name}: the run ends before its first step is done, "
        "with nothing new to save"
    ]


def test_a_second_signal_ends_the_process_at_once_wherever_it_is():
    process = start("deferred")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # as GNU timeout does: the same one, twice
    time.sleep(0.8)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    first, second = told.splitlines()
    assert first.startswith("SIGTERM: the run finishes its step, saves and ends;")
    assert second == "SIGINT again: the run ends at once"


def test_handlers_are_as_before_afterwards_and_nothing_is_left_open():
    before = [signal.getsignal(number) for number in stopping.SIGNALS]
    open_files = len(os.listdir("/dev/fd"))
    with stopping.watched() as stop:
        stop.defer()
        os.kill(os.getpid(), signal.SIGUSR1)
        while not stop.asked:
            time.sleep(0.01)
    assert stop.asked == "SIGUSR1"
    assert [signal.getsignal(number) for number in stopping.SIGNALS] == before
    assert len(os.listdir("/dev/fd")) == open_files


def test_a_run_in_a_thread_hears_of_no_signals():
    before = signal.getsignal(signal.SIGTERM)
    found = []

    def run():
        with stopping.watched() as stop:
            found.append((stop.asked, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [("", before)]


def test_one_process_agrees_with_itself():
    assert stopping.anywhere(True, False) == (True, False)


TWO = """
    import sys
    import jax
    from mtuner_jax.training import stopping

    rank, port = int(sys.argv[1]), sys.argv[2]
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
    print(stopping.anywhere(rank == 1, False), stopping.anywhere(False))
"""


def test_processes_agree_to_stop_where_one_of_them_was_asked_to():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(TWO), str(rank), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    last = [out.splitlines()[-1:] for out, _ in told]  # gloo speaks first
    assert last == [["(True, False) (False,)"]] * 2, told
