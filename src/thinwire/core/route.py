"""Which way messages take that cannot be averaged on the wire, and what owners who average them send back: see `owners`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from thinwire.codecs.aggregate import Mean
from thinwire.codecs.base import Codec
from thinwire.codecs.chain import Chain, Stage
from thinwire.codecs.deal import check_dealt, deal_of
from thinwire.codecs.dense import Dense
from thinwire.codecs.parts import Parts
from thinwire.codecs.stages import Selection
from thinwire.errors import ConfigError, check_choice

SUM_NBYTES = 4  # of the checksum before each part that is sent to an owner or by one
WEIGHT_NBYTES = 4  # of the weight behind it, where workers have one
WIDER = 4  # times as many entries as a worker sends of a block are sent back, where nothing else is said


@dataclass(frozen=True)
class Owners:
    """Settings of `route="owners"`.

    Args:
        back: what owners send; by default four times the entries that they get of a block, in the same values, or the same
            entries with `Striding`. It must have the same transform.
        feedback: the part of what an owner left out that it adds in the next round, from 0 to 1; by default the method's own.
    """

    back: Codec | None = None
    feedback: float | None = None

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.back is not None and not isinstance(self.back, Chain | Stage):
            raise ConfigError(
                f"what owners send back must be a chain such as DCT(64) >> TopK(128) >> Sign(), got {self.back!r}"
            )
        if self.feedback is not None and not 0 <= self.feedback <= 1:
            raise ConfigError(f"the feedback of owners must be from 0 to 1, got {self.feedback!r}")

    @property
    def kept(self) -> float:
        """The part of what an owner left out that it adds in the next round; all of it where nothing was said."""
        return 1.0 if self.feedback is None else self.feedback

    def back_of(self, chain: Chain) -> Chain:
        """What owners send where workers send by this chain. Values that are sent as they are go back so too.

        Where all workers send the same entries in a round, these come back and no others: there is nothing to say of them.
        """
        if chain.linear or (self.back is None and (chain.selection.everything or chain.selection.alike)):
            return chain
        if self.back is not None:
            return Chain.of(self.back)
        return replace(chain, selection=_wider(chain.selection))


Route = Literal["gather", "owners", "auto"] | Owners


def _wider(selection: Selection) -> Selection:
    if isinstance(selection.k, int):
        return replace(selection, k=WIDER * selection.k)
    return replace(selection, k=min(WIDER * selection.k, (1 + selection.k) / 2))


def check_route(route: object) -> Route:
    """Raise a `ConfigError` for what is no route."""
    if isinstance(route, Owners):
        return route
    check_choice("route", route, ("gather", "owners", "auto"))
    return route  # pyright: ignore[reportReturnType]


def chains_of(codec: Codec, tensors: Sequence[Any]) -> list[tuple[Chain, int]]:
    """The chains of a codec, and how many tensors each has.

    Raises:
        ConfigError: for a codec that is not made of chains.
    """
    if isinstance(codec, Parts):
        return [(chain, count) for count, one in codec.parts for chain, _ in chains_of(one, range(count))]
    if isinstance(codec, Dense):
        codec = replace(codec, gather=False)
    return [(Chain.of(codec), len(tensors))]


def keeps_rest(owners: Owners, codec: Codec) -> bool:
    """Whether owners keep what a codec leaves out of means: not of plain floats, whose rounding errors do not add up."""
    ((chain, _),) = chains_of(codec, ())
    return owners.kept > 0 and not chain.linear


def sent_nbytes(nbytes: int, *, weighted: bool = False) -> int:
    """Length of a part with its checksum, and its weight where there is one; a part that says nothing is not sent."""
    return nbytes + SUM_NBYTES + WEIGHT_NBYTES * weighted if nbytes else 0


def check_owned(mean: Mean, codec: Codec, owners: Owners) -> None:
    """Raise a `ConfigError` for messages that owners must not or cannot average."""
    if not mean.plain:
        raise ConfigError(f"route='owners' and a robust mean, {mean!r}: one hostile owner would dictate its share of the model")
    for chain, _ in chains_of(codec, ()):
        if not chain.linear:
            check_dealt(chain, owners.back_of(chain))


class Halves(NamedTuple):
    """Bytes of the two halves of a round, for each owner: of a worker's part for it, and of its mean; both as they are sent."""

    up: list[int]
    back: list[int]

    def sent(self, rank: int) -> tuple[int, int]:
        """Bytes that leave a worker in each half; its part for itself stays where it is."""
        return sum(self.up) - self.up[rank], self.back[rank] * (len(self.back) - 1)

    def most_sent(self) -> tuple[int, int]:
        """The same of whoever sends most."""
        up, back = zip(*(self.sent(rank) for rank in range(len(self.up))), strict=True)
        return max(up), max(back)

    def most_moved(self) -> tuple[int, int]:
        """Bytes that whoever sends or gets most sends or gets in each half: all other workers' parts, then all other means."""
        others, (up, back) = len(self.up) - 1, self.most_sent()
        return max(up, others * max(self.up)), max(back, sum(self.back) - min(self.back))


def owned_nbytes(
    owners: Owners, codec: Codec, model: Sequence[Tensor], which: Sequence[int], workers: int, *, weighted: bool = False
) -> Halves:
    """Bytes of a round whose messages are averaged by owners, without those of the vote.

    Args:
        owners: the settings.
        codec: what workers send.
        model: tensors of the shapes of the model.
        which: numbers of those that are sent.
        workers: how many there are.
        weighted: whether contributions have weights.
    """
    up, back, start = [0] * workers, [0] * workers, 0
    for chain, count in chains_of(codec, which):
        here = slice(start, start := start + count)
        deal = deal_of(chain, owners.back_of(chain), model, which[here], workers)
        up = [a + b for a, b in zip(up, deal.up_nbytes, strict=True)]
        back = [a + b for a, b in zip(back, deal.back_nbytes, strict=True)]
    return Halves([sent_nbytes(n, weighted=weighted) for n in up], [sent_nbytes(n) for n in back])
