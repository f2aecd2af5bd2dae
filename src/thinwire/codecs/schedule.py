"""CodecSchedule: another codec in later rounds. Codecs stay frozen; which one a round has follows from its number alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from thinwire.codecs.base import Codec, check_codec
from thinwire.codecs.chain import Chain, Stage
from thinwire.codecs.text import parse_codec
from thinwire.errors import ConfigError, check_whole_number

_LONGEST = 1000  # characters of a text, which may come from a file
_UNTIL = re.compile(r"\s+until\s+(\d+)\s*,\s*")


@dataclass(frozen=True, init=False, repr=False)
class CodecSchedule:
    """Codecs one after the other, each until a round.

    >>> from thinwire import DCT, Sign, TopK
    >>> CodecSchedule(DCT(64) >> TopK(256) >> Sign(), 64, DCT(64) >> TopK(32) >> Sign())
    DCT(64) >> TopK(256) >> Sign() until 64, DCT(64) >> TopK(32) >> Sign()

    Attributes:
        codecs: in their order.
        until: the last round of each but the last one, counted from 1.
    """

    codecs: tuple[Codec, ...]
    until: tuple[int, ...]

    def __init__(self, *parts: Codec | int):
        """Check codecs and rounds.

        Args:
            parts: a codec, its last round, the next codec, and so on; the last codec has no end.
        """
        if len(parts) % 2 == 0:
            raise ConfigError(f"a schedule is a codec, its last round, the next codec ... and ends with a codec, got {parts!r}")
        object.__setattr__(self, "codecs", _with_one_layout([check_codec(codec) for codec in parts[::2]]))
        rounds = parts[1::2]
        for least, number in zip([1, *rounds], rounds, strict=False):
            check_whole_number("the last round of a codec", number, least=least if isinstance(least, int) else 1)
        object.__setattr__(self, "until", rounds)

    def arithmetic(self, device: torch.device) -> str:
        """That of the first codec that has any: see `Codec.arithmetic`."""
        return next(filter(None, (codec.arithmetic(device) for codec in self.codecs)), "")

    @staticmethod
    def of(codec: Codec | CodecSchedule) -> CodecSchedule:
        """A schedule itself, or that of one codec for all rounds."""
        return codec if isinstance(codec, CodecSchedule) else CodecSchedule(codec)

    def at(self, round: int) -> Codec:
        """The codec of a round, counted from 1."""
        return self.codecs[sum(round > last for last in self.until)]

    @property
    def first_rounds(self) -> tuple[int, ...]:
        """The first round of each codec."""
        return (1, *(last + 1 for last in self.until))

    def map(self, change: Callable[[Codec], Codec]) -> CodecSchedule:
        """The same schedule of other codecs."""
        made: list[Codec | int] = [change(self.codecs[0])]
        for number, codec in zip(self.until, self.codecs[1:], strict=True):
            made += [number, change(codec)]
        return CodecSchedule(*made)

    def check_slots(self) -> None:
        """Refuse chains that would keep a slot in different domains: it goes on from one to the next.

        Raises:
            ConfigError: with the schedule, where transforms differ.
        """
        if len({Chain.of(codec).transform for codec in self.codecs}) > 1:
            raise ConfigError(f"the codecs of a schedule must have the same transform, got {self!r}")

    def __repr__(self) -> str:
        """As `parse_wire` reads it."""
        ends = [f" until {number}, " for number in self.until]
        return "".join(f"{codec!r}{end}" for codec, end in zip(self.codecs, [*ends, ""], strict=True))


def _with_one_layout(codecs: Sequence[Codec]) -> tuple[Codec, ...]:
    """The same codecs; several chains of one transform cut the same tensors into blocks, see `Stages`."""
    chains = {i: replace(Chain.of(codec), beside=()) for i, codec in enumerate(codecs) if isinstance(codec, Chain | Stage)}
    if len(codecs) < 2 or len({chain.transform for chain in chains.values()}) > 1:
        return tuple(replace(codec, beside=()) if isinstance(codec, Chain) and codec.beside else codec for codec in codecs)
    beside = tuple(chains.values())
    return tuple(replace(chains[i], beside=beside) if i in chains else codec for i, codec in enumerate(codecs))


def parse_wire(text: str) -> Codec | CodecSchedule:
    """What a text means on a command line: a codec, or several, each until a round.

    Args:
        text: as `parse_codec` takes it, or "CODEC until 64, CODEC".

    Raises:
        ConfigError: showing what is not understood, and what would be.
    """
    if len(text) > _LONGEST:
        raise ConfigError(f"a codec in words has at most {_LONGEST} characters, got {len(text)}: {text[:40]!r} ...")
    words = _UNTIL.split(text)
    if len(words) == 1:
        return parse_codec(text)
    return CodecSchedule(*(int(word) if i % 2 else parse_codec(word.strip()) for i, word in enumerate(words)))
