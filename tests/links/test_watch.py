"""A process that ends is noticed by its connection; one that only ends connections is not called dead."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from queue import SimpleQueue

import pytest

from tests.processes import LIMIT
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
            assert seen.next() == ("ended", id, f"life {id}")
    finally:
        for job in jobs:
            job.kill()
            job.communicate()
        seen.watch.close()


def test_a_process_that_ends_every_connection_is_left_to_its_beats() -> None:
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
