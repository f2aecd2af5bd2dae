"""ElasticLink: rounds of workers that come and go, on any store of objects that are written once.

    while there is no sound manifest of this round:
        look at what is there: messages, hellos
        if all that are expected are there, or the deadline is past, and enough of them are: propose a manifest
    apply exactly the messages that the manifest counts, in the order of their senders' ids

There is no leader, no lease and no common clock: whose manifest is first is decided by the store (`Store.create`). A worker
that is late finds its message left out, follows the others, and sends what it kept. A worker that comes, comes back, or reads
along does the same without a message: see `core.elastic`, the engine on top.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence

from thinwire.errors import ConfigError, LinkError, WireError, check_not_negative, check_whole_number
from thinwire.links.archive import Archive
from thinwire.links.base import Peers, Ticket
from thinwire.links.decided import Decided, LosesObjects, RoundGone, Status
from thinwire.links.manifest import MOST_MANIFEST, NO_CHAIN, FixedRoster, Manifest, Roster, Signer, Store, Terms
from thinwire.links.signed import Message, as_payload, open_text, seal_message, seal_text
from thinwire.links.view import Place, View
from thinwire.links.waits import Waits
from thinwire.network import Op, Traffic
from thinwire.payload import Payload

log = logging.getLogger("thinwire")

_MOST_UNSOUND = 8  # manifests of one round that are passed over
_MOST_TWINS = 3  # rounds in which this worker's message was there before it sent one: a former life's, at most


class ElasticLink(LosesObjects):
    """One worker's end of a run whose workers come and go.

    Args:
        store: where the objects of the run are.
        signer: this worker's id and signature.
        roster: who may take part; a list of ids where that never changes.
        patience: how many times the median of recent waits a round waits for those who are late.
        quorum: messages that a round needs.
        poll: seconds between two looks at the store, to begin with.
        keeper: the only worker that proposes manifests, for a store that cannot create a key only where there is none.
        timeout: seconds after which waiting ends with a `LinkError`.
        first_wait: seconds that those who found a run wait for each other.
        checkpoint_every: rounds between two checkpoints of the replicated state, which members write in turn; 0 never.
    """

    def __init__(
        self,
        store: Store,
        signer: Signer,
        *,
        roster: Roster | Sequence[int],
        patience: float = 3.0,
        quorum: int = 1,
        poll: float = 0.05,
        keeper: int | None = None,
        timeout: float = 600.0,
        first_wait: float = 10.0,
        checkpoint_every: int = 64,
    ):
        """Nothing is read or written before `opt.join()`."""
        for name, value in (("patience", patience), ("poll", poll), ("timeout", timeout), ("first_wait", first_wait)):
            check_not_negative(name, value)
        check_whole_number("quorum", quorum)
        check_whole_number("checkpoint_every", checkpoint_every, least=0)
        self.store, self.signer, self.quorum, self.keeper, self.timeout = store, signer, quorum, keeper, timeout
        self.checkpoint_every = checkpoint_every
        self.roster = roster if isinstance(roster, Roster) else FixedRoster(roster)
        self.waits, self.archive = Waits(patience, poll, first_wait), Archive(store, signer)
        self.start_over(Place(0, NO_CHAIN, (), 0, self.roster.first))
        if signer.id not in self.roster.members(self.roster.newest(self.roster.first)):
            raise ConfigError(f"worker {signer.id} is not in the roster, which has {', '.join(map(str, self.members))}")
        self.terms, self.ended, self._twins = Terms(0), False, 0
        self.longest = 1 << 16  # bytes of a message, which the engine knows
        self.kept, self.blocks, self.step_seconds = False, 0, 0.0  # of the next message: see `Message`
        self.decided: Decided | None = None  # the round before
        self._left_out: tuple[int, ...] = ()
        self._work_done = 0.0  # seconds until most had done their work of the round at hand

    def start_over(self, place: Place) -> None:
        """Go to a place in the history, such as that of a checkpoint."""
        self.place, self._since = place, self.now()
        self.members = self.roster.members(place.roster)
        # One that was added since, and is in the newest roster only, hears itself: it may be the only one who is left.
        self._view = View(self.store, self.signer, place, (*self.members, self.rank))

    @property
    def elastic(self) -> ElasticLink:
        """This link."""
        return self

    @property
    def rank(self) -> int:
        """This worker's id in the roster."""
        return self.signer.id

    @property
    def size(self) -> int:
        """How many workers may take part."""
        return len(self.members)

    def peers(self) -> Peers:
        """Who takes part in the round at hand."""
        return Peers(self.rank, self.members, tuple(sorted({*self.place.expected, self.rank})))

    def traffic(self, op: Op, sizes: Sequence[int]) -> Traffic:  # noqa: ARG002
        """A message goes to the store once, and those of the others come from there."""
        mine = max(sizes, default=0)
        return Traffic(mine, sum(sizes) - mine if sizes else 0)

    @property
    def status(self) -> Status:
        """For people who watch the run."""
        place, counted = self.place, self.decided.manifest.counted if self.decided else {}
        return Status(place.number, place.expected, tuple(counted), self._left_out, self.waits.deadline(), self.ended)

    # --- Rounds ------------------------------------------------------------------------------------------------------------

    def post(self, payload: Payload, op: Op) -> Ticket:
        """Send this worker's message of the round at hand, unless the others have gone on without it."""
        if op != "gather" or payload.purpose != "round":
            raise LinkError(
                f"worker {self.rank}: an elastic link gathers the messages of rounds, and cannot {op} for {payload.purpose!r}: "
                "not all workers are there at the same time"
            )
        place, terms, posted = self.place, self.terms, False
        if self.rank not in self.members:
            raise LinkError(f"worker {self.rank} is no longer in the roster of this run, and can only read along")
        found = self._manifest() if 0 < self.waits.long_round() < self.now() - self._since else None  # it is late
        if found is not None and self.rank in found[0].counted:
            self._meet_twin()
        if found is None:
            told = (terms.step, terms.last, self.kept, self.blocks, self.step_seconds)
            message = Message(place.number, self.rank, place.chain, *told, payload.to_bytes())
            posted = self._send(seal_message(self.signer, message), message)
        return _ElasticTicket(self, payload, posted)

    def _send(self, raw: bytes, message: Message) -> bool:
        """Write a message; False where one of this worker is there already, which then stands."""
        if self.store.create(self.place.key(str(self.rank)), raw):
            self._view.add(message, raw)
            return True
        self._meet_twin()
        return False

    def _meet_twin(self) -> None:
        """A message of this worker is there that it has not sent."""
        self._twins += 1
        log.warning("round %d: a message of worker %d is there already, and stands", self.place.number, self.rank)
        if self._twins > _MOST_TWINS:
            raise LinkError(
                f"worker {self.rank}: in {self._twins} rounds its message was there before it was sent: another "
                "process has the same key, or somebody else writes to its place in the store"
            )

    def next_round(self) -> Decided | None:
        """The round at hand, where its manifest is there already; nothing is waited for."""
        found = self._manifest()
        return None if found is None else self._take(*found, posted=False)

    def wait_as_guest(self) -> Decided | None:
        """Wait for the round at hand without a message, having said hello; None where the run has ended."""
        return self._decide(posted=False)

    def say(self, kind: str) -> None:
        """Tell the others something in the round at hand: see `View.marks`; "end": the run has reached its last step."""
        self.store.create(self.place.key(f"{kind}-{self.rank}"), seal_text(self.signer, kind, self.place.chain))

    def close(self) -> None:
        """Leave: the others do not wait for this worker any more."""
        if not self.ended:
            self.say("bye")

    def _decide(self, *, posted: bool) -> Decided | None:
        """Wait until the round at hand has a manifest, and propose it where nobody else does."""
        started, pauses = self.now(), self.waits.pauses()
        self._work_done = started - self._since if posted and not self.kept else 0.0
        most_there = False
        while True:
            names, waited = self.store.list(self.place.key("")), self.now() - started
            found = self._manifest(names)
            if found is None:
                self._view.look(names, most=self.longest)
                if not most_there and self._view.most_there:
                    most_there = True
                    self._most_there_after(waited, self.now() - self._since, fresh=posted and not self.kept)
                if self._view.marks["end"]:
                    self.ended = True
                    return None
                if self._may_close(waited, posted=posted):
                    found = self._propose(names)
            if found is not None:
                return self._take(*found, posted=posted)
            if waited > self.timeout:
                raise LinkError(self._in_vain(waited), lost=[i for i in self.place.expected if i not in self._view.messages])
            self.elapse(next(pauses))

    def _most_there_after(self, waited: float, since: float, *, fresh: bool) -> None:
        """Most messages of the round are there, so long after this worker's own, and after the manifest before."""
        if any(not message.kept for message in self._view.messages.values()):
            self._work_done = since
        if fresh:
            self.waits.waited(waited)

    def _may_close(self, waited: float, *, posted: bool) -> bool:
        """Whether this worker proposes a manifest now."""
        if self.keeper is not None and self.keeper != self.rank:
            return False
        view, there = self._view, set(self._view.messages)
        wanted = set(self.place.expected) if self.place.number else set(self.members)  # of round 0: those who found the run
        wanted |= view.marks["here"]
        wanted -= view.bad | view.left | view.marks["hello"] | set(self.absent())  # who has just come has nothing to send
        if posted:
            late = waited > self.waits.deadline() and self.now() - self._since > self.waits.long_round()
            return len(there) >= self.quorum and (wanted <= there or late)
        enough = len(there) >= self.quorum or len(view.come) >= self.quorum
        return enough and (wanted <= there or waited > self.waits.silence())

    def _propose(self, names: dict[str, int]) -> tuple[Manifest, bytes] | None:
        """Propose a manifest; what stands there in the end, where it is sound."""
        view, place = self._view, self.place
        counted, terms = self._agreeing()
        roster = max(place.roster, self.roster.newest(place.roster))
        expected = (set(counted) | view.come) - view.left
        manifest = Manifest(
            number=place.number,
            chain=place.chain,
            by=self.rank,
            counted=counted,
            expected=tuple(sorted(expected & set(self.roster.members(roster)))),
            hello=tuple(sorted(view.come)),
            bye=tuple(sorted(view.left)),
            terms=terms,
            seconds=max(0.0, self._work_done),
            roster=roster,
            here=tuple(sorted(view.marks["here"] - view.left - set(counted))),
        )
        at = next(k for k in range(len(names) + 1) if f"manifest-{k}" not in names)  # those before are unsound
        raw = seal_text(self.signer, "manifest", place.chain, manifest.to_bytes())
        try:
            winner = self.store.decide(place.key(f"manifest-{at}"), raw)
        except WireError:  # somebody has just put something there that is too long
            winner = b""
        return (manifest, raw) if winner == raw else self._manifest()

    def _agreeing(self) -> tuple[dict[int, str], Terms]:
        """The messages of most workers, who agree on what the round is, and the terms; none where they are too few."""
        view, step = self._view, self.place.step
        votes = Counter((m.step, m.last) for m in view.messages.values() if m.step >= step)
        if votes:
            chosen, count = max(votes.items(), key=lambda vote: (vote[1], vote[0]))
            if count >= self.quorum:
                counted = {i: view.digests[i] for i, m in sorted(view.messages.items()) if (m.step, m.last) == chosen}
                return counted, Terms(*chosen, self.terms.lr)
        return {}, Terms(step, lr=self.terms.lr)

    def _manifest(self, names: dict[str, int] | None = None) -> tuple[Manifest, bytes] | None:
        """The first sound manifest of the round at hand and its bytes; what is unsound is passed over by all workers alike."""
        for k in range(_MOST_UNSOUND):
            key = f"manifest-{k}"
            if names is not None and key not in names:
                return None
            try:
                raw = self.store.get(self.place.key(key), most=MOST_MANIFEST)
                return None if raw is None else (self._sound(raw), raw)
            except WireError as error:
                log.warning("round %d: %s is passed over: %s", self.place.number, key, error)
        raise LinkError(f"round {self.place.number}: {_MOST_UNSOUND} unsound manifests: somebody disturbs this run")

    def _sound(self, raw: bytes) -> Manifest:
        """A manifest, once it is known to be one of this round and history by one who may propose it."""
        place = self.place
        told = Manifest.from_bytes(raw[: max(0, len(raw) - self.signer.nbytes)])
        coming = set(self.roster.members(told.roster))  # of one that was added since it is the key of its signature, too
        open_text(self.signer, told.by, "manifest", place.chain, raw)
        members = set(self.members)
        if told.number != place.number or told.chain != place.chain:
            raise WireError(f"of round {told.number} or of another history", rank=told.by)
        if told.roster < place.roster:
            raise WireError("an older roster than before", rank=told.by)
        named = {told.by, *told.expected, *told.hello, *told.bye, *told.here}
        if odd := (set(told.counted) - members) | (named - members - coming):
            raise WireError(f"it names {sorted(odd)[:8]}, which are not in the roster", rank=told.by)
        if self.keeper is not None and told.by != self.keeper:
            raise WireError(f"only worker {self.keeper} keeps the manifests of this run", rank=told.by)
        if told.counted and len(told.counted) < self.quorum:
            raise WireError(f"{len(told.counted)} messages, where {self.quorum} are needed", rank=told.by)
        if told.terms.step < place.step or (not told.counted and told.terms.step != place.step):
            raise WireError(f"step {told.terms.step} after step {place.step}", rank=told.by)
        return told

    def _take(self, manifest: Manifest, raw: bytes, *, posted: bool) -> Decided:
        """Fetch the messages that a manifest counts, and go to the next round."""
        messages = [self._counted_message(sender, digest) for sender, digest in sorted(manifest.counted.items())]
        like, terms = Payload.of_bytes(b"", purpose="round"), manifest.terms
        sound = [m for m in messages if m is not None and (m.step, m.last) == (terms.step, terms.last)]
        payloads = tuple(as_payload(m, like) for m in sound)
        mine = posted and self._view.digests.get(self.rank) == manifest.counted.get(self.rank, "")
        blocks, seconds = {m.sender: m.blocks for m in sound}, tuple(m.step_seconds for m in sound)
        decided = Decided(manifest, payloads, blocks, mine, self.place.expected, seconds)
        left = set(self.place.expected) - set(manifest.counted) - set(manifest.bye)
        self._left_out = tuple(sorted(left))
        self.waits.took([manifest.seconds] if manifest.counted else [])
        chain = hashlib.sha256(raw).digest()
        self.start_over(Place(manifest.number + 1, chain, manifest.expected, terms.step, manifest.roster))
        self.decided = decided
        return decided

    def _counted_message(self, sender: int, digest: str) -> Message | None:
        """A message that a manifest names; None where what is there is not it, which all workers find alike.

        One that is not there is waited for: to go on without it would be right only if nobody ever finds it.
        """
        started, pauses = self.now(), self.waits.pauses()
        while self.now() - started <= self.timeout:
            try:
                if (found := self._view.find(sender, digest, most=self.longest)) is not None:
                    return found
            except WireError as error:
                log.warning("round %d: a message that is counted is left out: %s", self.place.number, error)
                return None
            if self._gone(self.now() - started):
                raise RoundGone(self.place.number)
            self.elapse(next(pauses))
        raise LinkError(
            f"round {self.place.number}: the message of worker {sender}, which the manifest counts, was not there for "
            f"{self.timeout:g} s",
            lost=[sender],
        )

    def _gone(self, waited: float) -> bool:  # noqa: ARG002 (a cluster asks how long)
        """Whether a message of the round at hand that was not found will not come."""
        return self.archive.newest() >= self.place.number

    def _in_vain(self, waited: float) -> str:
        place, view = self.place, self._view
        missing = [i for i in place.expected if i not in view.messages]
        names = ", ".join(f"worker {i}" for i in missing) or "nobody"
        return (
            f"worker {self.rank}, round {place.number}: no manifest after {waited:.0f} s; {len(view.messages)} messages are "
            f"there, {self.quorum} are needed; missing: {names}"
        )


class _ElasticTicket(Ticket):
    def __init__(self, link: ElasticLink, payload: Payload, posted: bool):
        self.link, self.payload, self.posted = link, payload, posted

    def _finish(self) -> list[Payload]:
        decided = self.link._decide(posted=self.posted)
        return list(decided.messages) if decided is not None else []
