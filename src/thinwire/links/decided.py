"""What an elastic link tells the engine on top: rounds that are decided, where the run stands, and what can come between."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from thinwire.errors import LinkError
from thinwire.links.archive import Archive
from thinwire.links.base import Link
from thinwire.links.manifest import Manifest
from thinwire.links.view import Place
from thinwire.payload import Payload


class RoundGone(LinkError):
    """The messages of a round are gone: whoever still needs them begins again at a checkpoint.

    Args:
        number: of the round.
    """

    def __init__(self, number: int):
        """Keep the number."""
        super().__init__(f"the messages of round {number} are gone: a later checkpoint holds what became of it")
        self.number = number


class Moved(LinkError):
    """The run has to be founded again, or was: manifests were lost, or nobody who takes part holds its state."""


@dataclass(frozen=True)
class Decided:
    """A round whose manifest is there.

    Attributes:
        manifest: what it was.
        messages: that it counts and that are what they should be, in the order of their senders' ids.
        blocks: how many of its blocks each of them says that its sender has worked on.
        mine: whether this worker's own is among them; not where it was a former life's.
        expected: ids that the round waited for.
        step_seconds: that the senders of those messages take for a local step; 0 where they do not say.
    """

    manifest: Manifest
    messages: tuple[Payload, ...]
    blocks: Mapping[int, int]
    mine: bool
    expected: tuple[int, ...] = ()
    step_seconds: tuple[float, ...] = ()


@dataclass(frozen=True)
class Status:
    """For people who watch a run.

    Attributes:
        round: the number of the round at hand.
        expected: ids that it waits for.
        counted: ids that counted in the round before.
        left_out: ids that were expected in the round before and did not count.
        deadline: seconds that a worker waits for others after its own message.
        ended: whether the run has ended.
    """

    round: int
    expected: tuple[int, ...]
    counted: tuple[int, ...]
    left_out: tuple[int, ...]
    deadline: float
    ended: bool


@dataclass(frozen=True)
class Era:
    """A stretch of a run's history, begun by workers that found it, or found it again.

    Attributes:
        index: 0 for the first.
        number: of the round that it began with.
        chain: SHA-256 of the manifest before that round.
        by: the worker whose state it began with.
    """

    index: int
    number: int
    chain: bytes
    by: int


class LosesObjects(Link):
    """What differs where objects can be lost, as on a cluster. By default they cannot: a store keeps what was written.

    Attributes:
        own_checkpoints: that this worker keeps for itself; None where it keeps none.
    """

    own_checkpoints: Archive | None = None

    def arrive(self) -> None:
        """Go on with a store that has lost everything."""

    def settle(self, place: Place | None) -> Era | None:  # noqa: ARG002
        """Take part in the founding of the run, or learn that it runs; None where a run begins with its first round.

        Args:
            place: of the state that this worker has; None for a worker without any.
        """
        return None

    def hold_state(self) -> None:
        """Told when this worker has the state of the run: others may ask for it."""

    def ask_for_state(self, after: int) -> bool:  # noqa: ARG002
        """Wait for a member to write a checkpoint of a later round than `after`; False where nobody would."""
        return False

    def state_wanted(self) -> bool:
        """Whether somebody waits for a checkpoint."""
        return False

    def absent(self) -> Collection[int]:
        """Ids of workers that are known not to be there any more."""
        return ()
