"""A process that ends is noticed by its connection; one that only ends connections is not called dead."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from queue import SimpleQueue

import pytest

from tests.processes import LIMIT
from thinwire.links.beats import Beats
from thinwire.links.watch import _MOST_TRIES, Watch

LISTEN = """
import socket, sys
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
kept = []
while True:
    kept.append(listening.accept())
"""


class Seen:
    """What a watch has told."""

    def __init__(self) -> None:
        self.told: SimpleQueue[tuple[str, int, str]] = SimpleQueue()
        self.watch = Watch(lambda *who: self.told.put(("reached", *who)), lambda *who: self.told.put(("ended", *who)))

    def next(self) -> tuple[str, int, str]:
        return self.told.get(timeout=LIMIT)


def test_a_process_that_is_killed_is_noticed_and_the_others_are_still_watched() -> None:
    seen = Seen()
    jobs = [subprocess.Popen([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for id, job in enumerate(jobs):
            assert job.stdout is not None
            seen.watch.follow(id, f"life {id}", f"127.0.0.1|{int(job.stdout.readline())}")
            assert seen.next() == ("reached", id, f"life {id}")
        for id in (1, 0):
            jobs[id].kill()
            while (told := seen.next())[0] == "reached":  # its port may be open for a moment longer than its connection
                assert told[1] == id
            assert told == ("ended", id, f"life {id}")
    finally:
        for job in jobs:
            job.kill()
            job.communicate()
        seen.watch.close()


def test_a_process_that_ends_every_connection_is_left_to_its_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.links.watch._SHORT", LIMIT)  # however slow this machine is
    seen = Seen()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        closed = threading.Event()

        def close_all() -> None:
            for _ in range(_MOST_TRIES):
                listening.accept()[0].close()
            closed.set()

        threading.Thread(target=close_all, daemon=True).start()
        seen.watch.follow(3, "life", f"127.0.0.1|{listening.getsockname()[1]}")
        assert [seen.next() for _ in range(_MOST_TRIES)] == [("reached", 3, "life")] * _MOST_TRIES
        assert closed.wait(LIMIT)
        seen.watch.close()
    assert seen.told.empty()


@pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1|", "127.0.0.1|x"])
def test_an_address_that_is_none_tells_nothing_and_harms_nobody(address: str) -> None:
    seen = Seen()
    seen.watch.follow(0, "odd", address)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        seen.watch.follow(1, "sound", f"127.0.0.1|{listening.getsockname()[1]}")
        assert seen.next() == ("reached", 1, "sound")
        seen.watch.close()
    assert seen.told.empty()


def test_a_worker_has_one_connection_whatever_is_said_of_it() -> None:
    seen = Seen()
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1|{listening.getsockname()[1]}"
        for _ in range(3):
            seen.watch.follow(0, "life", address)  # as after a restart of the host
        assert seen.next() == ("reached", 0, "life")
        seen.watch.follow(0, "next life", f"127.0.0.1|{other.getsockname()[1]}")
        assert seen.next() == ("reached", 0, "next life")
        with listening.accept()[0] as connection:
            assert connection.recv(1) == b"", "the connection of the former life is closed"
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()  # there was one only
        seen.watch.close()


def _beats() -> Beats:
    beats = Beats(None, 0, range(3), address="127.0.0.1|0")  # type: ignore[arg-type]
    beats._note({1: "1|a 1 holds-0", 2: "2|b 1 holds-0"}, time.monotonic())
    beats._note({1: "1|a 2 holds-0", 2: "2|b 2 holds-0"}, time.monotonic())
    return beats


def test_one_that_refuses_a_connection_is_gone_and_one_that_beats_on_is_not() -> None:
    beats = _beats()
    beats.silence = LIMIT  # however slow this machine is
    assert (beats.silent(), set(beats.alive())) == (set(), {1, 2})
    beats._ended(1, "a former life")
    assert beats.silent() == set()
    beats._ended(1, "1|a")
    assert (beats.silent(), set(beats.alive())) == ({1}, {2})
    beats._note({1: "1|a 3 holds-0"}, time.monotonic())
    assert beats.silent() == {1}, "that beat may have been under way when it ended"
    beats._note({1: "1|a 4 holds-0"}, time.monotonic())
    assert (beats.silent(), set(beats.alive())) == (set(), {1, 2}), "only its connection is refused"
    beats._ended(1, "1|a")
    beats._note({1: "3|c 1 waits"}, time.monotonic())
    assert beats.silent() == set(), "another process of this worker"
    beats.close()


def test_nobody_is_silent_where_this_worker_could_not_listen() -> None:
    beats = _beats()
    beats.silence = LIMIT
    beats._looked -= 0.6 * beats.silence
    for heard in beats._heard.values():
        heard.at -= 1.1 * beats.silence
    assert beats.silent() == set()
    beats._note({}, time.monotonic())
    assert beats.silent() == set(), "they have another half of that time"
    beats.close()


def test_the_beat_of_a_link_that_is_never_closed_ends_before_python() -> None:
    """A thread that is within a store's C++ code when Python ends would abort the process."""
    program = """
import atexit, time
from thinwire.links.beats import Beats

class Slow:
    def another(self): return self
    def ask(self, *words): time.sleep(0.3)
    def get(self, key): return None

beats = Beats(Slow(), 0, range(2), silence=0.1, address="127.0.0.1|0")
atexit.register(lambda: print("running" if beats._thread.is_alive() else "ended"))  # called last
beats.say("here")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (ended.returncode, ended.stdout) == (0, "ended\n"), ended.stderr
