"""The logic of an elastic link on a store in memory, with a clock that the test moves."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import replace

import pytest
import torch

from thinwire import Metered
from thinwire.errors import ConfigError, LinkError, WireError
from thinwire.links.elastic import Decided, ElasticLink
from thinwire.links.manifest import FixedRoster, Manifest, MemoryStore, Roster, Terms, Unsigned
from thinwire.links.signed import Message, open_message, open_text, seal_message, seal_text
from thinwire.links.waits import Waits
from thinwire.payload import Payload


class Quick(ElasticLink):
    """A link whose clock moves when it waits, or when the test says so."""

    clock = 0.0

    def now(self) -> float:
        return self.clock

    def elapse(self, seconds: float) -> None:
        self.clock += seconds


def link(store: MemoryStore, id: int, *, roster: object = (0, 1, 2), **settings: object) -> Quick:
    return Quick(store, Unsigned(id), roster=roster, **{"first_wait": 1.0, "timeout": 50.0, **settings})


def founded(store: MemoryStore, ids: tuple[int, ...] = (0, 1, 2), **settings: object) -> list[Quick]:
    """Links of workers that have founded a run."""
    links = [link(store, id, **settings) for id in ids]
    for each in links:
        each.say("hello")
    for each in links:
        decided = each.wait_as_guest()
        assert decided is not None and decided.manifest.counted == {}
    return links


def message(value: int, step: int = 4) -> Payload:
    return Payload(torch.full((8,), value, dtype=torch.uint8))


def send(each: Quick, value: int, step: int = 4) -> object:
    each.terms = Terms(step, lr=(0.1,))
    return each.post(message(value), "gather")


def values(decided: Decided | None) -> dict[int, int]:
    assert decided is not None
    return {p.sender: int(p.data[0]) for p in decided.messages}


def test_all_that_are_there_count_in_the_order_of_their_ids() -> None:
    links = founded(MemoryStore())
    assert all(each.place.expected == (0, 1, 2) and each.place.number == 1 for each in links)
    tickets = [send(each, 10 + each.rank) for each in reversed(links)]
    for ticket in tickets:
        assert [int(p.data[0]) for p in ticket.wait()] == [10, 11, 12]
    assert len({each.place for each in links}) == 1, "all are at the same place of one history"
    assert all(each.decided.mine and each.decided.manifest.terms == Terms(4, lr=(0.1,)) for each in links)
    assert links[0].clock == 0.0, "nobody waited for anybody"


def test_a_dead_worker_costs_one_deadline_and_is_not_expected_again() -> None:
    a, b, _ = founded(MemoryStore())
    tickets = [send(a, 1), send(b, 2)]
    assert values(a.decided) == {}
    tickets[0].wait()
    assert a.waits.first <= a.clock <= 3 * a.waits.first, "nothing was measured yet: the wait of founders"
    tickets[1].wait()
    assert a.place == b.place and a.place.expected == (0, 1)
    assert a.status.left_out == (2,) and a.status.counted == (0, 1)
    before = a.clock
    tickets = [send(a, 1, 8), send(b, 2, 8)]
    for ticket in tickets:
        ticket.wait()
    assert a.clock == before


def test_who_is_late_is_left_out_and_finds_the_message_not_counted() -> None:
    a, b, c = founded(MemoryStore())
    send(a, 1)
    send(b, 2).wait()
    send(c, 3).wait()  # it comes after the manifest
    assert values(c.decided) == {0: 1, 1: 2} and not c.decided.mine
    assert c.place == b.place
    tickets = [send(c, 4, 8), send(a, 5, 8), send(b, 6, 8)] if a.next_round() else []
    assert [t.wait()[-1].sender for t in tickets] == [2, 2, 2], "at the next round it is early enough, though not expected"


def test_a_worker_that_comes_is_expected_in_the_next_round() -> None:
    store = MemoryStore()
    a, b = founded(store, (0, 1), first_wait=0.0)
    c = link(store, 2)
    while c.next_round():
        pass
    c.say("hello")
    tickets = [send(a, 1), send(b, 2)]
    for ticket in tickets:
        ticket.wait()
    decided = c.wait_as_guest()
    assert decided is not None and decided.manifest.hello == (2,) and not decided.mine
    assert a.place == c.place and a.place.expected == (0, 1, 2)


def test_when_all_have_died_those_who_come_back_settle_the_round_among_themselves() -> None:
    store = MemoryStore()
    a, *_ = founded(store)
    send(a, 1)  # and then all are killed
    back = [link(store, id) for id in (0, 1, 2)]
    for each in back:
        while each.next_round():
            pass
        each.say("hello")
    decided = [each.wait_as_guest() for each in back]
    assert values(decided[0]) == {0: 1}, "what a dead worker had sent stands"
    assert not any(d.mine for d in decided), "but it is not this life's"
    assert back[0].clock == 0.0 and back[0].place.expected == (0, 1, 2)
    with_quorum = MemoryStore()
    founded(with_quorum, quorum=2)
    again = [link(with_quorum, id, quorum=2) for id in (0, 1, 2)]
    for each in again:
        assert each.next_round() is not None
        each.say("hello")
    empty = again[2].wait_as_guest()
    assert empty is not None and empty.manifest.counted == {} and empty.manifest.terms.step == 0


def test_a_former_lifes_message_stands_and_a_twin_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    a, b, c = founded(store)
    twin = link(store, 0)
    assert twin.next_round()
    for step in range(4, 16, 4):
        tickets = [send(each, 1, step) for each in (a, b, c)]
        for ticket in tickets:
            ticket.wait()
        send(twin, 9, step).wait()
        assert values(twin.decided)[0] == 1 and not twin.decided.mine
    assert "a message of worker 0 is there already, and stands" in caplog.text
    for each in (a, b, c):
        send(each, 1, 16)
    with pytest.raises(LinkError, match="another process has the same key"):
        send(twin, 9, 16)


def test_a_quorum_is_waited_for_and_the_wait_ends() -> None:
    a, *_ = founded(MemoryStore(), quorum=2)
    with pytest.raises(
        LinkError, match=r"no manifest after 5\d s; 1 messages are there, 2 are needed; missing: worker 1, worker 2"
    ):
        send(a, 1).wait()


def test_only_the_keeper_proposes() -> None:
    store = MemoryStore()
    a, b = (link(store, id, roster=(0, 1), keeper=1) for id in (0, 1))
    for each in (a, b):
        each.say("hello")
    assert b.wait_as_guest() is not None
    assert a.wait_as_guest() is not None and a.decided.manifest.by == 1
    forged = link(store, 0, roster=(0, 1))
    assert forged.next_round()
    send(forged, 1)
    send(b, 2)
    forged._view.look({"1": 200}, most=1000)
    assert forged._propose({}) is not None
    assert b._manifest() is None, "one that another worker wrote is passed over"


def test_bye_and_end_are_heard() -> None:
    a, b, c = founded(MemoryStore())
    c.close()
    tickets = [send(a, 1), send(b, 2)]
    for ticket in tickets:
        ticket.wait()
    assert a.clock == 0.0 and a.decided.manifest.bye == (2,) and a.place.expected == (0, 1)
    a.say("end")
    assert b.wait_as_guest() is None and b.ended
    assert send(b, 3).wait() == []


@pytest.mark.parametrize(
    ("name", "data"),
    [("1", b"garbage"), ("1", b""), ("hello-1", b"x" * 32), ("7", b"stranger"), ("one", b"?"), ("1", bytes(100_000))],
)
def test_objects_that_are_not_sound_are_left_out(name: str, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    a, _, c = founded(store)
    store.create(f"x/00000001/{name}", data)
    a.longest = c.longest = 1000
    tickets = [send(a, 1), send(c, 3)]
    for ticket in tickets:
        assert [p.sender for p in ticket.wait()] == [0, 2]
    assert a.place == c.place
    assert "left out" in caplog.text or name in ("7", "one")


def test_a_squatted_manifest_is_passed_over_by_all() -> None:
    store = MemoryStore()
    a, b, c = founded(store)
    store.create("x/00000001/manifest-0", b"mine")
    of_another_history = replace(a.decided.manifest, number=1, chain=bytes(32)).to_bytes()
    store.create("x/00000001/manifest-1", seal_text(Unsigned(2), "manifest", bytes(32), of_another_history))
    tickets = [send(each, 1) for each in (a, b, c)]
    for ticket in tickets:
        ticket.wait()
    assert a.place == b.place == c.place
    assert "x/00000001/manifest-2" in store.objects
    for k in range(8):
        store.create(f"x/00000002/manifest-{k}", b"x")
    with pytest.raises(LinkError, match="8 unsound manifests"):
        send(a, 1, 8).wait()


def test_a_manifest_that_counts_what_is_not_there_stalls_and_does_not_split() -> None:
    store = MemoryStore()
    a, b, c = founded(store)
    manifest = replace(a.decided.manifest, number=1, chain=a.place.chain, by=2, counted={1: "0" * 64}, terms=Terms(4))
    raw = seal_text(Unsigned(2), "manifest", a.place.chain, manifest.to_bytes())
    store.create("x/00000001/manifest-0", raw)
    with pytest.raises(LinkError, match="which the manifest counts, was not there for 50 s"):
        a.next_round()
    send(b, 2)
    assert values(c.next_round()) == {}, "other bytes than those it counts are left out by all"


def test_a_message_of_another_kind_of_round_is_left_out() -> None:
    a, b, c = founded(MemoryStore())
    tickets = [send(a, 1, 4), send(b, 2, 4), send(c, 3, 8)]
    for ticket in tickets:
        ticket.wait()
    assert values(a.decided) == {0: 1, 1: 2} and a.decided.manifest.terms.step == 4 and a.place == c.place


def test_a_link_that_is_elastic_does_rounds_only_and_says_so_through_decorators() -> None:
    a, *_ = founded(MemoryStore())
    with pytest.raises(LinkError, match="cannot mean for 'round'"):
        a.mean(Payload(torch.zeros(2)))
    with pytest.raises(LinkError, match="cannot gather for 'alarm'"):
        a.all_gather(Payload.of_bytes(b"x", purpose="alarm"))
    assert Metered(a).elastic is a
    assert a.peers().expected == (0, 1, 2) and a.peers().id == 0 and (a.rank, a.size) == (0, 3)


class Revised(Roster):
    """Worker 2 is revoked in revision 1."""

    first = "0"
    latest = "0"

    def newest(self, token: str) -> str:
        return max(token, self.latest)

    def members(self, token: str) -> tuple[int, ...]:
        if token not in ("0", "1"):
            raise WireError("no such revision")
        return (0, 1, 2) if token == "0" else (0, 1, 5)


def test_a_new_roster_counts_from_the_next_round_on() -> None:
    store, roster = MemoryStore(), Revised()
    a, b, c = founded(store, roster=roster)
    roster.latest = "1"
    for ticket in [send(each, 1) for each in (a, b, c)]:
        assert len(ticket.wait()) == 3, "in this round the old one counts"
    assert a.members == (0, 1, 5)
    with pytest.raises(LinkError, match="worker 2 is no longer in the roster"):
        send(c, 1, 8)
    for ticket in [send(a, 1, 8), send(b, 1, 8)]:
        assert [p.sender for p in ticket.wait()] == [0, 1]


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="worker 9 is not in the roster, which has 0, 1, 2"):
        link(MemoryStore(), 9)
    with pytest.raises(ConfigError, match="quorum must be a whole number of at least 1, got 0"):
        link(MemoryStore(), 0, quorum=0)
    with pytest.raises(ConfigError, match="patience must be at least 0"):
        link(MemoryStore(), 0, patience=-1)
    with pytest.raises(ConfigError, match="a roster has at least one id"):
        FixedRoster([])


# --- What is written ------------------------------------------------------------------------------------------------------


def test_a_message_verifies_only_as_what_it_is() -> None:
    chain, signer = bytes(range(32)), Unsigned(3)
    told = Message(5, 3, chain, 20, True, True, 2, 0.5, b"12345678")
    raw = seal_message(signer, told)
    assert open_message(signer, raw, number=5, sender=3, chain=chain) == told
    flipped = [raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :] for at in range(len(raw))]
    wrong = [(cut, 5, 3, chain) for cut in (b"", raw[:20], raw[:-1], raw + b"x", *flipped)]
    wrong += [(raw, 6, 3, chain), (raw, 5, 2, chain), (raw, 5, 3, bytes(32))]
    for data, number, sender, history in wrong:
        with pytest.raises(WireError):
            open_message(signer, data, number=number, sender=sender, chain=history)
    with pytest.raises(WireError, match="signature of its hello is wrong"):
        open_text(signer, 3, "hello", chain, seal_text(signer, "bye", chain))


def test_a_manifest_is_written_in_one_way_and_refused_in_any_other() -> None:
    manifest = Manifest(3, bytes(32), 1, {1: "ab" * 32}, (0, 1), (0,), (), Terms(4, False, (0.1,)), 0.5, "0")
    raw = manifest.to_bytes()
    assert Manifest.from_bytes(raw) == manifest
    told = json.loads(raw)
    damages = [{"number": -1}, {"number": True}, {"counted": {"1": "ab"}}, {"expected": [1, 0]}, {"seconds": "1"}, {"by": None}]
    damages += [
        {"terms": {"step": 1, "last": False, "lr": [float("nan")]}},
        {"chain": "zz"},
        {"roster": "x" * 300},
        {"more": 1},
    ]
    for damage in damages:
        with pytest.raises(WireError):
            Manifest.from_bytes(json.dumps(told | damage, sort_keys=True, separators=(",", ":")).encode())
    for raw_ in (b"", b"[]", b"{}", raw[:-1], raw + b" ", b"[" * 100_000):
        with pytest.raises(WireError):
            Manifest.from_bytes(raw_)


def test_deadlines_come_from_what_was_measured() -> None:
    waits = Waits(3.0, 0.05, 10.0)
    assert waits.deadline() == waits.silence() == 10.0
    assert waits.long_round() == 0.0
    waits.took([1.0, 1.0, 0.0, 2.0, 1.0])
    assert waits.deadline() == 0.5, "a machine may be busy for a moment"
    assert waits.long_round() == 1.5 and waits.silence() == 10.0
    for seconds in (0.2, 0.2, 9.0):
        waits.waited(seconds)
    assert waits.deadline() == pytest.approx(0.6), "three times the median; one slow round does not count"
    pauses = waits.pauses()
    taken = [next(pauses) for _ in range(10)]
    assert taken[0] == 0.05 and max(taken) == pytest.approx(0.6 / 8) and taken == sorted(taken)


def test_who_sends_at_once_what_was_left_out_waits_for_a_whole_round_of_the_others() -> None:
    """Or two workers would shut each other out in turn, round by round."""
    store = MemoryStore()
    a, b = founded(store, (0, 1), first_wait=0.0)
    for step in (4, 8):
        for each in (a, b):
            each.clock += 1.0  # of local work
        for ticket in [send(a, 1, step), send(b, 2, step)]:
            ticket.wait()
    assert a.waits.periods == pytest.approx([1.0, 1.0])
    a.kept = True
    ticket, started = send(a, 3, 12), a.clock
    assert ticket.wait()[0].sender == 0
    assert 1.5 < a.clock - started < 2.0
    assert a.waits.periods == pytest.approx([1.0, 1.0]), "a round without new work does not count"


def test_checkpoints_older_than_two_go_with_the_messages_before_them_and_manifests_stay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    links = founded(store)
    archive = links[0].archive
    assert archive.newest() == -1 and list(archive.states(most=100)) == []
    for number in range(1, 5):
        for ticket in [send(each, 1, 4 * number) for each in links]:
            ticket.wait()
        archive.write(number, b"state %d" % number)
    assert sorted(store.list("ckpt/")) == ["00000003-0", "00000004-0"]
    assert sorted(store.list("x/")) == [
        *(f"{n:08}/manifest-0" for n in range(4)),
        *(f"00000004/{i}" for i in "012"),
        "00000004/manifest-0",
    ]
    for name in ("00000009-1", "99999999-1", "00000008-\u00b2", "x"):
        store.create(f"ckpt/{name}", b"garbage" * 10)
    with caplog.at_level(logging.WARNING):
        assert list(archive.states(most=100)) == [b"state 4", b"state 3"]
    assert caplog.text.count("is passed over") == 2


def test_an_old_round_is_not_decided_anew_after_its_messages_are_gone() -> None:
    store = MemoryStore()
    a, b, slow = founded(store)
    for number in range(1, 4):
        for ticket in [send(each, 1, 4 * number) for each in (a, b)]:
            ticket.wait()
        a.archive.write(number, b"state")
    slow.clock = 1e6
    with pytest.raises(LinkError, match="the messages of round 1 are gone: a later checkpoint holds what became of it"):
        send(slow, 1).wait()


def test_the_digest_of_a_manifest_is_the_chain_of_the_next_round() -> None:
    store = MemoryStore()
    a, *_ = founded(store)
    assert a.place.chain == hashlib.sha256(store.objects["x/00000000/manifest-0"]).digest()
