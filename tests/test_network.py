"""The formulas of a ring against a ring that is played hop by hop, and the words for speeds against their numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import ConfigError
from thinwire.network import (
    Network,
    Wire,
    ddp_bytes,
    parse_bandwidth,
    parse_duration,
    per_worker,
    ring_hops,
    ring_traffic,
    show_bytes,
)

calm = settings(deadline=None, database=None, derandomize=True)
some_sizes = st.lists(st.integers(0, 10_000), min_size=1, max_size=5)


# --- A ring, played ------------------------------------------------------------------------------------------------------


def play_gather(sizes: list[int]) -> tuple[list[int], list[int], int]:
    """Bytes sent and received by each worker, and hops: each passes on to its successor what it got last."""
    workers = len(sizes)
    owned = [{r} for r in range(workers)]
    holding = list(range(workers))
    sent, received, hops = [0] * workers, [0] * workers, 0
    while any(len(o) < workers for o in owned):
        hops += 1
        arriving = [holding[(r - 1) % workers] for r in range(workers)]
        for r in range(workers):
            sent[r] += sizes[holding[r]]
            received[r] += sizes[arriving[r]]
            owned[r].add(arriving[r])
        holding = arriving
    return sent, received, hops


def play_mean(workers: int, chunk: int) -> tuple[list[int], list[int], int]:
    """The same for a reduce-scatter followed by an all-gather of chunks; checks that all end with the sum."""
    values = [[10**r * (c + 1) for c in range(workers)] for r in range(workers)]
    expected = [sum(column) for column in zip(*values, strict=True)]
    sent, received, hops = [0] * workers, [0] * workers, 0
    for phase in ("reduce", "spread"):
        for hop in range(workers - 1):
            hops += 1
            first = 0 if phase == "reduce" else 1
            moving = [((r + first - hop) % workers, values[r][(r + first - hop) % workers]) for r in range(workers)]
            for r in range(workers):
                c, value = moving[(r - 1) % workers]
                values[r][c] = values[r][c] + value if phase == "reduce" else value
                sent[r] += chunk
                received[r] += chunk
    assert all(v == expected for v in values), "the played ring is no all-reduce"
    return sent, received, hops


@given(sizes=some_sizes)
@calm
def test_gather_counts_what_a_ring_sends(sizes: list[int]) -> None:
    sent, received, hops = play_gather(sizes)
    formula = [ring_traffic("gather", sizes, r) for r in range(len(sizes))]
    assert [t.sent for t in formula] == sent
    assert [t.received for t in formula] == received
    assert ring_hops("gather", len(sizes)) == hops


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_mean_counts_what_a_ring_sends(workers: int, chunk: int) -> None:
    sent, received, hops = play_mean(workers, chunk)
    sizes = [chunk * workers] * workers
    formula = [ring_traffic("mean", sizes, r) for r in range(workers)]
    assert [t.sent for t in formula] == sent
    assert [t.received for t in formula] == received
    assert ring_hops("mean", workers) == hops


@given(size=st.integers(0, 10_000), workers=st.integers(1, 5))
@calm
def test_a_mean_that_does_not_divide_evenly_is_right_to_the_byte(size: int, workers: int) -> None:
    one = ring_traffic("mean", [size] * workers, 0)
    assert one.sent == one.received
    exact = 2 * size * (workers - 1) / workers
    assert exact - 1 < one.sent <= exact


@given(sizes=some_sizes)
@calm
def test_what_is_sent_is_received(sizes: list[int]) -> None:
    formula = [ring_traffic("gather", sizes, r) for r in range(len(sizes))]
    assert sum(t.sent for t in formula) == sum(t.received for t in formula)


@pytest.mark.parametrize("op", ["mean", "gather"])
def test_alone_costs_nothing(op) -> None:
    assert ring_traffic(op, [1234], 0) == (0, 0)
    assert ring_hops(op, 1) == 0
    assert Network(bandwidth=1.0, latency=5.0).seconds(op, [1234]) == 0.0


# --- Seconds -------------------------------------------------------------------------------------------------------------


@given(
    workers=st.integers(2, 5),
    chunk=st.integers(0, 10**6),
    bandwidth=st.floats(1e3, 1e12),
    latency=st.floats(0, 10),
)
@calm
def test_equal_wires_take_the_time_of_all_hops_one_after_the_other(
    workers: int, chunk: int, bandwidth: float, latency: float
) -> None:
    network = Network(bandwidth=bandwidth, latency=latency)
    gathered = sum(latency + 8 * chunk / bandwidth for _ in range(workers - 1))
    assert network.seconds("gather", [chunk] * workers) == pytest.approx(gathered, rel=1e-12)
    averaged = sum(latency + 8 * chunk / bandwidth for _ in range(2 * (workers - 1)))
    assert network.seconds("mean", [chunk * workers] * workers) == pytest.approx(averaged, rel=1e-12)


def test_the_slowest_worker_sets_the_pace() -> None:
    sizes = [100, 100, 100]
    alone = Network(bandwidth=8.0).seconds("gather", sizes)
    assert alone == 200.0  # 2 x 100 bytes at 1 byte a second
    for slow in range(3):
        wires = tuple(8.0 if r == slow else 1e9 for r in range(3))
        assert Network(bandwidth=wires).seconds("gather", sizes) == alone


def test_the_narrower_direction_counts() -> None:
    sizes = [50, 50]  # a ring of two: each sends and receives 50 bytes
    assert Network(bandwidth=8.0, down=80.0).seconds("gather", sizes) == 50.0
    assert Network(bandwidth=80.0, down=8.0).seconds("gather", sizes) == 50.0
    assert Network(bandwidth=80.0, down=(80.0, 40.0)).seconds("gather", sizes) == 10.0
    assert Network(down=8.0).seconds("gather", sizes) == 50.0  # upward unlimited


def test_directions_are_told_apart_where_messages_differ() -> None:
    sizes = [1000, 0]  # rank 0 only sends, rank 1 only receives
    assert Network(bandwidth=(8.0, 1e30), down=1e30).seconds("gather", sizes) == 1000.0
    assert Network(bandwidth=1e30, down=(1e30, 8.0)).seconds("gather", sizes) == 1000.0
    assert Network(bandwidth=(1e30, 8.0), down=(8.0, 1e30)).seconds("gather", sizes) < 1e-9


@pytest.mark.parametrize(("op", "hops"), [("gather", 3), ("mean", 6)])
def test_latency_is_paid_per_hop_at_the_pace_of_the_slowest(op, hops: int) -> None:
    assert Network(latency=0.5).seconds(op, [10] * 4) == hops * 0.5
    assert Network(latency=(0.1, 0.5, 0.2, 0.0)).seconds(op, [10] * 4) == hops * 0.5


@given(
    sizes=st.lists(st.integers(0, 10_000), min_size=2, max_size=5),
    bandwidth=st.floats(1.0, 1e9),
    latency=st.floats(0, 10),
)
@calm
def test_one_number_is_the_same_as_a_list_of_it(sizes: list[int], bandwidth: float, latency: float) -> None:
    n = len(sizes)
    short = Network(bandwidth=bandwidth, latency=latency)
    long = Network(bandwidth=(bandwidth,) * n, latency=(latency,) * n, down=(bandwidth,) * n)
    long.check(n)
    short.check(n)
    for op in ("mean", "gather"):
        assert short.seconds(op, sizes) == long.seconds(op, sizes)


def test_no_limits_take_no_time() -> None:
    assert Network().seconds("mean", [10**12] * 8) == 0.0


@pytest.mark.parametrize("name", ["bandwidth", "latency", "down"])
def test_a_list_of_the_wrong_length_is_refused_by_name(name: str) -> None:
    network = Network(**{name: (1.0, 2.0, 3.0)})
    network.check(3)
    with pytest.raises(ConfigError, match=f"{name} lists 3 workers, but there are 4"):
        network.check(4)


@pytest.mark.parametrize(
    ("settings_", "shown"),
    [
        ({"bandwidth": 0.0}, "bandwidth .* got 0.0"),
        ({"bandwidth": -5.0}, "bandwidth .* got -5.0"),
        ({"bandwidth": math.nan}, "bandwidth .* got nan"),
        ({"bandwidth": (1.0, 0.0)}, r"bandwidth .* got \(1.0, 0.0\)"),
        ({"down": 0.0}, "down .* got 0.0"),
        ({"down": (-1.0, 1.0)}, r"down .* got \(-1.0, 1.0\)"),
        ({"latency": -0.1}, "latency .* got -0.1"),
        ({"latency": math.inf}, "latency .* got inf"),
        ({"latency": math.nan}, "latency .* got nan"),
        ({"latency": (0.0, -1.0)}, r"latency .* got \(0.0, -1.0\)"),
    ],
)
def test_bad_wires_are_refused_with_the_value(settings_: dict, shown: str) -> None:
    with pytest.raises(ConfigError, match=shown):
        Network(**settings_)


# --- Words ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("100mbit", 100e6),
        ("1.5gbit", 1.5e9),
        ("100Mbps", 100e6),
        ("100 Mbit/s", 100e6),
        ("3kbits", 3e3),
        ("2tbit", 2e12),
        ("56k", 56e3),
        ("300bit", 300.0),
        ("1000", 1000.0),
        (".5g", 0.5e9),
        ("  10mbit ", 10e6),
        ("inf", math.inf),
        (" INF ", math.inf),
    ],
)
def test_bandwidths(text: str, bits: float) -> None:
    assert parse_bandwidth(text) == bits


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20ms", 0.02),
        ("1.5s", 1.5),
        ("200us", 200e-6),
        ("2min", 120.0),
        ("2m", 120.0),
        ("3", 3.0),
        ("0", 0.0),
        ("0ms", 0.0),
        (" 20 MS ", 0.02),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-15)


@pytest.mark.parametrize(
    "text",
    ["", " ", "fast", "0", "0mbit", "-5mbit", "100mb", "100MB/s", "1.2.3gbit", ".", "mbit", "100xbit", "nan", "-inf", "1,5g"],
)
def test_what_is_no_bandwidth_is_shown(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bandwidth(text)
    assert repr(text) in str(caught.value)
    assert "100mbit" in str(caught.value), "and an example of what is allowed"


@pytest.mark.parametrize("text", ["", " ", "soon", "-1s", "1.2.3s", ".", "ms", "20 minutes", "1h", "nan", "inf", "1,5s", "s5"])
def test_what_is_no_duration_is_shown(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)
    assert "20ms" in str(caught.value), "and an example of what is allowed"


@pytest.mark.parametrize("parse", [parse_bandwidth, parse_duration])
@given(text=st.text(max_size=12))
@calm
def test_any_text_is_a_number_or_a_config_error(parse: Callable[[str], float], text: str) -> None:
    try:
        outcome = parse(text)
    except ConfigError as error:
        outcome = str(error)
    assert repr(text) in outcome if isinstance(outcome, str) else outcome >= 0


@given(value=st.integers(1, 10**6), unit=st.sampled_from([("", 1), ("k", 10**3), ("m", 10**6), ("g", 10**9), ("t", 10**12)]))
@calm
def test_every_unit_of_bandwidth_multiplies(value: int, unit: tuple[str, int]) -> None:
    for ending in ("", "bit", "bps", "bits", "bit/s"):
        assert parse_bandwidth(f"{value}{unit[0]}{ending}") == value * unit[1]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (999.4, "999 B"),
        (999.5, "1 kB"),
        (1000, "1 kB"),
        (1500, "1.5 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (3_300_000, "3.3 MB"),
        (12_345_678_901, "12.3 GB"),
        (2_500_000_000_000, "2.5 TB"),
        (-1500, "-1.5 kB"),
    ],
)
def test_bytes_for_people(count: float, text: str) -> None:
    assert show_bytes(count) == text


@given(count=st.integers(0, 10**14))
@calm
def test_shown_bytes_are_short_and_within_half_a_percent(count: int) -> None:
    number, unit = show_bytes(count).split(" ")
    scale = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}[unit]
    assert "e" not in number
    assert float(number) < 1000
    assert float(number) * scale == pytest.approx(count, rel=0.005)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_broadcast_passes_down_the_line(workers: int) -> None:
    traffic = [ring_traffic("broadcast", [100] * workers, rank) for rank in range(workers)]
    assert sum(t.sent for t in traffic) == sum(t.received for t in traffic) == 100 * (workers - 1)
    assert (traffic[0].received, traffic[-1].sent) == (0, 0)
    assert ring_hops("broadcast", workers) == workers - 1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_pair_sends_each_message_once_in_one_hop(workers: int) -> None:
    for rank in range(4):  # whoever they are
        assert ring_traffic("pair", [100] * workers, rank) == (100 * (workers - 1),) * 2
    assert ring_hops("pair", workers) == workers - 1


def test_the_time_of_a_pair_is_that_of_its_two_wires() -> None:
    network = Network(bandwidth=(8.0, 80.0, 40.0), latency=(9.0, 0.5, 0.25), down=(8.0, 16.0, 80.0))
    assert network.seconds("pair", [100, 100], (1, 2)) == 0.5 + 50.0
    assert network.seconds("pair", [100, 100], (0, 2)) == 9.0 + 100.0
    assert network.seconds("pair", [100], (0,)) == 0.0
    assert Network(bandwidth=8.0, latency=1.0).seconds("pair", [100, 100]) == 101.0


def test_exchanges_follow_each_other_on_the_wire_of_those_that_take_part() -> None:
    wire = Wire(Network(bandwidth=8.0), workers=3)
    assert wire.send(1.0, "pair", [10, 10], (0, 1)) == 11.0
    assert wire.send(2.0, "pair", [5, 5], (0, 1)) == 16.0, "after the one before"
    assert wire.send(2.0, "pair", [5], (2,)) == 2.0, "nobody to wait for, nothing to send"
    assert wire.send(3.0, "gather", [1, 1, 1]) == 18.0, "all wait for the two"
    assert wire.send(30.0, "gather", [1, 1, 1]) == 32.0, "a free wire starts at once"
    assert Wire().occupy(1.5, 2.0) == 3.5


def test_one_number_or_one_per_worker() -> None:
    assert per_worker("latency", 2, 3) == (2.0, 2.0, 2.0)
    assert per_worker("latency", [1, 2], 2) == (1.0, 2.0)
    with pytest.raises(ConfigError, match="latency lists 2 workers, but there are 3"):
        per_worker("latency", (1.0, 2.0), 3)


@pytest.mark.parametrize("workers", [1, 2, 4, 7])
def test_the_bytes_of_ddp_are_those_of_a_ring(workers: int) -> None:
    parameters = 7 * 4 * 1000
    ring = ring_traffic("mean", [4 * parameters] * workers, 0).sent
    assert ddp_bytes(parameters, workers) == ring and ddp_bytes(parameters, workers, steps=3) == 3 * ring
