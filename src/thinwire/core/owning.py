"""What an optimizer keeps and tells where its messages are averaged by owners: see `owners`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from thinwire.codecs.aggregate import PLAIN, Mean
from thinwire.codecs.base import Codec
from thinwire.codecs.deal import Deal, deal_of
from thinwire.codecs.schedule import CodecSchedule
from thinwire.codecs.wire import HEADER_NBYTES
from thinwire.core.joining import JoiningOptimizer
from thinwire.core.outgoing import Outgoing
from thinwire.core.route import Halves, Owners, Route, chains_of, check_owned, keeps_rest, owned_nbytes
from thinwire.errors import ConfigError
from thinwire.links.base import Link, Peers
from thinwire.sharding.shards import local

log = logging.getLogger("thinwire")

OWED = "owed"  # the slot of what an owner has left out of the parameters' messages; of other states "owed_" and their name


class OwningOptimizer(JoiningOptimizer):
    """Base of all methods: which route messages take, and what this worker has left out as an owner.

    Attributes:
        owners: the settings of owners; None where messages are gathered, or averaged on the wire.
        owners_keep: the part of what they left out that owners add later, where nothing else is said.
        unowned: why owners cannot average what this method sends, set before the constructor of the base; empty where they can.
    """

    owners: Owners | None = None
    owners_keep: ClassVar[float] = 1.0
    unowned: str = ""
    mean: Mean = PLAIN
    in_pairs: ClassVar[bool] = False
    link: Link
    peers: Peers
    due: tuple[int, ...]

    if TYPE_CHECKING:

        def which(self, due: tuple[int, ...]) -> tuple[int, ...]:
            """Numbers of the parameters that a round of these fragments is about: see `Algorithm`."""
            ...

    def choose_route(self, route: Route) -> None:
        """Decide what becomes of messages that are gathered otherwise; called again when it is known what they hold.

        Raises:
            ConfigError: where owners cannot or must not average them; on links without owners also where the wire averages.
        """
        if route == "gather":
            return
        owners = route if isinstance(route, Owners) else Owners()
        owners = replace(owners, feedback=self.owners_keep if owners.feedback is None else owners.feedback)
        if route != "auto":
            self._check_link()
        if not self.unowned and all(codec.linear for codec in self.sent_whole()[0]):
            return
        if route == "auto" and not self._are_better(owners):
            return
        self._check_owners(owners)
        self.owners = owners
        self.make_owed()

    def sent_whole(self) -> tuple[Sequence[Codec], Sequence[int]]:
        """The codecs of messages of everything, as they follow each other, and the parameters in one: one tensor of each."""
        return self.codecs.codecs, range(len(self._active))

    def _check_link(self) -> None:
        what = f"{type(self).__name__} with route='owners'"
        if self.link.elastic is not None:
            raise ConfigError(
                f"{what} on an elastic link: an owner that dies would stall the round of all others: use 'gather'"
            )
        if self.in_pairs:
            raise ConfigError(f"{what}: its workers meet in pairs, of which there is no mean to own: use 'gather'")

    def _check_owners(self, owners: Owners) -> None:
        self._check_link()
        if self.unowned:
            raise ConfigError(f"{type(self).__name__} with route='owners': {self.unowned}: use 'gather'")
        for codec in self.sent_whole()[0]:
            check_owned(self.mean, codec, owners)

    def _are_better(self, owners: Owners) -> bool:
        """Whether messages may be averaged by owners, and fewer bytes leave a worker so, all of its shards together."""
        try:
            self._check_owners(owners)
        except ConfigError:
            return False
        params, workers, ((*_, codec), which) = self.params(), self.peers.size, self.sent_whole()
        gathered = (HEADER_NBYTES + codec.nbytes([params[i] for i in which])) * (workers - 1)
        owned = sum(owned_nbytes(owners, codec, params, which, workers).most_sent())
        owned, gathered = self.shards.totals([owned, gathered])  # shards differ, and must decide alike
        return owned < gathered

    def owed_codecs(self) -> dict[str, Codec]:
        """What is averaged by owners of each parameter: the slot of what they leave out, and the codec."""
        return {OWED: self.codecs.codecs[-1]}

    def owned(self, which: Sequence[int]) -> dict[str, Any]:
        """What `Owned` needs to know of a round of these parameters, besides what is sent."""
        return {"owed": list(self._owed_of(OWED, which)), "model": self.params(), "which": which}

    def owned_nbytes(self, out: Outgoing, due: tuple[int, ...]) -> Halves | None:
        """Bytes of the messages of such a round; None where they are not averaged by owners."""
        if self.owners is None or out.codec.linear or self.peers.size < 2:
            return None
        before, self.due = self.due, due
        owned, self.due = self.owned(self.which(due)), before
        weighted, workers = out.weight is not None, self.peers.size
        return owned_nbytes(self.owners, out.codec, owned["model"], owned["which"], workers, weighted=weighted)

    def _owed_of(self, slot: str, which: Sequence[int]) -> Iterator[Tensor | None]:
        return (self.own_state[self._active[i]].get(slot) for i in which)

    def make_owed(self) -> None:
        """Make the slots of what this worker leaves out as an owner, where they are not there yet."""
        if self.owners is None or self.peers.size < 2:
            return
        for slot, codec in self.owed_codecs().items():
            if not keeps_rest(self.owners, codec):
                continue
            first, *others = [one for one in self.codecs.codecs if not one.linear] or [codec]
            for other in others:  # what is owed goes on from one codec to the next
                CodecSchedule(first, 1, other).check_slots()
            self._slots[slot] = "owed"
            shapes = self._deal_of(codec, self.peers.size).shares[self.peers.rank].slot_shapes()
            for p, shape in zip(self._active, shapes, strict=True):
                if slot not in self.own_state[p]:
                    self.own_state[p][slot] = torch.zeros(shape, device=local(p).device)

    @property
    def owed_slots(self) -> frozenset[str]:
        """Names of the slots of what this worker has left out as an owner."""
        return frozenset(name for name, start in self._slots.items() if start == "owed")

    def redealt(self, workers: int) -> dict[str, dict[int, Callable[[Sequence[Tensor]], Tensor]]]:
        """What makes what this worker has left out, of what so many owners have: by slot and number in the state dict."""
        found = {}
        for slot, codec in self.owed_codecs().items() if self.owners is not None else ():
            if slot in self._slots:
                before, now = self._deal_of(codec, workers), self._deal_of(codec, self.peers.size)
                numbers = [index for index, _ in self._indexed()]
                found[slot] = {n: functools.partial(now.take_over, i, self.peers.rank, before) for i, n in enumerate(numbers)}
        return found

    def _deal_of(self, codec: Codec, workers: int) -> Deal:
        """How the parameters are dealt to so many owners."""
        assert self.owners is not None
        ((chain, _),) = chains_of(codec, self._active)
        return deal_of(chain, self.owners.back_of(chain), self.params(), range(len(self._active)), workers)

    def owed_elsewhere(self, slots: Iterable[str]) -> str:
        """What a state with these slots lacks or has too much for how messages travel here; empty where it fits."""
        theirs = {name for name in slots if name == OWED or name.startswith(f"{OWED}_")}
        if lost := sorted(theirs - self.owed_slots):
            return f"dropped, since no owners average messages here: {', '.join(lost)}, what they had left out of means"
        if fresh := sorted(self.owed_slots - theirs):
            return f"begins at zero, since no owners had averaged messages before: {', '.join(fresh)}"
        return ""

    def _checked(self, state_dict: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
        """The state, with zeros for what is owed where it is of a run whose messages were gathered."""
        state = state_dict["state"]
        if note := self.owed_elsewhere({name for entries in state.values() for name in entries}):
            log.warning("%s", note)
        names = [key for group in state_dict["param_groups"] for key in group["params"]]
        begun = {name for entries in state.values() for name in self.owed_slots & entries.keys()}
        filled = {
            names[index]: {name: torch.zeros_like(self.own_state[p][name]) for name in self.owed_slots - begun}
            | dict(state.get(names[index], {}))
            for index, p in self._indexed()
            if index < len(names)
        }
        return super()._checked({**state_dict, "state": {**state, **filled}})

    def _adopt(self, group: dict[str, Any]) -> None:
        super()._adopt(group)
        self.make_owed()
