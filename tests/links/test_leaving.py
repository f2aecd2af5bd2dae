"""A worker that leaves the job is named by those who wait for it, with its reason, and not after the whole timeout.

Every wait here may take an hour: only being told early lets a test end.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from thinwire.links import host_job
from thinwire.links.heartbeat import Departure, Heartbeat, Part, _departure, _gist

pytestmark = pytest.mark.timeout(900)

# Ranks 3, 4 and 5 each share a group with ranks 0, 1 and 2, and leave it in a way of their own. In each ring of four, rank 1 is
# no neighbour of the one that leaves: no connection of its own is closed.
PROGRAM = """
rank = connect(backend="gloo", timeout=3600).rank
groups = {leaver: dist.new_group([0, 1, 2, leaver]) for leaver in (3, 4, 5)}


def exchange(link, rounds):
    for _ in range(rounds):
        link.mean(Payload(torch.ones(1000)))


def local_sgd(link, finish):
    x = torch.nn.Parameter(torch.ones(10))
    opt = thinwire.LocalSGD(torch.optim.SGD([x], lr=0.1), link, H=4)
    for _ in range(6):
        x.grad = torch.ones(10)
        opt.step()
    if finish:
        opt.finish()


def told(work):
    try:
        work()
    except thinwire.errors.LinkError as error:
        return {"said": str(error), "lost": error.lost}
    return "nothing"


if rank == 3:
    link = TorchLink(groups[3], timeout=3600)
    exchange(link, 2)
    time.sleep(4)  # slow, as in an evaluation: nobody may call it gone
    exchange(link, 1)
    raise ValueError("the batch is\\x1b[31m bad\\nand so on")
if rank == 4:
    local_sgd(TorchLink(groups[4], timeout=3600), finish=False)
    sys.exit()
if rank == 5:
    exchange(TorchLink(groups[5], timeout=3600), 1)
    disconnect()
    sys.stdin.read()  # the process lives on
    sys.exit()
links = {leaver: TorchLink(group, timeout=3600) for leaver, group in groups.items()}
seen = {"rank": rank, 3: told(lambda: exchange(links[3], 10))}
seen[4] = told(lambda: local_sgd(links[4], finish=True))
exchange(links[5], 1)
seen[5] = told(lambda: exchange(links[5], 1))
os.write(1, (json.dumps(seen) + "\\n").encode())  # at once: three processes write to this pipe
sys.stdin.read()
"""


# One process imports everything, which takes seconds, and splits into the ranks of the job.
START = """
import json, os, sys, time
import torch, torch.distributed as dist
import thinwire
from thinwire.links import TorchLink, connect, disconnect
from thinwire.payload import Payload

thinwire.LocalSGD  # on first use its modules are imported
torch.set_num_threads(1)
for place in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.environ.update(place)
        break
else:
    while True:
        os.wait()
"""


def start(program: str, places: Sequence[Mapping[str, str]], tmp_path: Path) -> subprocess.Popen[str]:
    script = tmp_path / "program.py"
    script.write_text(START + program)
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, script, json.dumps(places)]
    return subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes)


def end(job: subprocess.Popen[str]) -> str:
    """End all ranks; what they said on stderr."""
    os.killpg(job.pid, signal.SIGKILL)
    return job.communicate()[1]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What ranks 0, 1 and 2 were told of those who left."""
    store, places = host_job(6)
    job = start(PROGRAM, places, tmp_path_factory.mktemp("leaving"))
    assert job.stdout is not None
    lines = [job.stdout.readline() for _ in range(3)]
    said = end(job)
    del store
    assert all(lines), said[-3000:]
    return sorted(map(json.loads, lines), key=lambda told: told["rank"])


@pytest.mark.parametrize("rank", range(3))
def test_a_worker_whose_program_raises_is_named_with_its_error(seen: list[dict[str, Any]], rank: int) -> None:
    told = seen[rank]["3"]
    assert told["said"].startswith(
        f"rank {rank}, round 4 (all-reduce of 4 kB): rank 3 left after round 3: ValueError: the batch"
    )
    assert "ValueError: the batch is?[31m bad" in told["said"], "one line, without control characters"
    assert "and so on" not in told["said"]
    assert told["lost"] == [3]


@pytest.mark.parametrize("rank", range(3))
def test_a_worker_that_skips_finish_is_named_by_its_number_in_the_group(seen: list[dict[str, Any]], rank: int) -> None:
    """Of the group of 0, 1, 2 and 4 it is the fourth."""
    told = seen[rank]["4"]
    assert told["said"].startswith(f"rank {rank}, round 2 (all-reduce of ")
    assert "rank 3 left after round 1: its program ended (did it take fewer steps, or skip finish()?)" in told["said"]
    assert told["lost"] == [3]


@pytest.mark.parametrize("rank", range(3))
def test_a_worker_that_disconnects_and_lives_on_is_named(seen: list[dict[str, Any]], rank: int) -> None:
    told = seen[rank]["5"]
    assert f"rank {rank}, round 2 (all-reduce of 4 kB): rank 3 left after round 1: " in told["said"]
    assert told["lost"] == [3]


HOLDER = """
link = connect(backend="gloo", timeout=3600)
link.mean(Payload(torch.ones(10)))
if link.rank == 0:
    raise RuntimeError("no more data")
try:
    link.mean(Payload(torch.ones(10)))
except thinwire.errors.LinkError as error:
    print(error, flush=True)
"""


@pytest.mark.slow  # the quick ones above are about the same goodbye, of ranks that do not hold the store
def test_the_rank_that_holds_the_store_says_why_it_leaves_before_it_takes_the_store_along(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": ""}
    running = start(HOLDER, [job | {"RANK": str(rank)} for rank in range(2)], tmp_path)
    assert running.stdout is not None
    told = running.stdout.readline()
    end(running)
    assert told.startswith("rank 1, round 2 (all-reduce of 40 B): rank 0 left after round 1: RuntimeError: no more data")


# --- What is said ------------------------------------------------------------------------------------------------------------


def test_who_saw_an_exchange_through_is_not_to_blame_for_it() -> None:
    part = Part()
    first, second, third = (part.begin(is_round=True) for _ in range(3))
    part.open -= {first, third}
    gone = Departure(1, True, "", {"group": {"posts": part.posts, "rounds": 3, "open": sorted(part.open), "gave_up": False}})
    assert gone.took_part("group", first)
    assert not gone.took_part("group", second), "it was begun and not waited for"
    assert gone.took_part("group", third)
    assert not gone.took_part("group", third + 1)
    assert not gone.took_part("another", 1)


def test_a_departure_survives_the_store_and_a_process_that_comes_back_is_there_again() -> None:
    store = dist.HashStore()
    beat = Heartbeat(store, 1)
    part = beat.part("group")
    part.begin(is_round=True)
    assert not beat.news()
    assert beat.departures([0, 1]) == []
    beat.give_up("group")
    assert beat.news() and not beat.news(), "told once"
    (said,) = beat.departures([0, 1])
    assert (said.rank, said.ended, said.gave_up("group"), said.gave_up("other")) == (1, False, True, False)
    assert beat.part("group") is part and not part.gave_up
    assert not beat.departures([1])[0].gave_up("group"), "it has come back to the group"
    beat._leave("ValueError: no")
    (said,) = beat.departures([1])
    assert (said.ended, said.words("group")) == (True, "left after round 1: ValueError: no")
    again = Heartbeat(store, 1)
    assert again.departures([1]) == []
    again.stop()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"parts": 3}',
        b'{"parts": {"g": {}}, "ended": true, "reason": ""}',
        b'{"ended": true, "reason": "", "parts": {"g": {"posts": "x", "rounds": 0, "open": [], "gave_up": 1}}}',
    ],
)
def test_nonsense_in_the_store_is_nothing_said(raw: bytes) -> None:
    assert _departure(2, raw) == Departure(2, ended=False, reason="", parts={})


def test_a_reason_is_one_short_line() -> None:
    long = _gist(ValueError("x" * 10_000))
    assert long.startswith("ValueError: xxx") and long.endswith("...") and len(long) < 250
    assert _gist(KeyboardInterrupt()) == "KeyboardInterrupt"
    told = _departure(0, json.dumps({"ended": True, "reason": "a\x1b[2Jb\nc" + "d" * 9999, "parts": {}}).encode())
    assert told.reason == "a?[2Jb"
