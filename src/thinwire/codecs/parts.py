"""Parts: one message of several codecs, where the tensors of a round are of several kinds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Messages, check_codec
from thinwire.codecs.chain import Chain, Stage
from thinwire.codecs.dense import Dense
from thinwire.codecs.registry import VALUE_FORMATS
from thinwire.codecs.wire import PART_NBYTES, dense_blocks, in_one_part, part_header, same_part
from thinwire.errors import ConfigError, WireError
from thinwire.payload import Payload


@dataclass(frozen=True)
class Parts(Codec):
    """The first tensors by one codec, the next by another, and so on; the parts of their messages one after the other.

    Args:
        parts: (number of tensors, codec) for each part.
    """

    parts: tuple[tuple[int, Codec], ...]

    def __post_init__(self) -> None:
        """Check the parts."""
        for count, codec in self.parts:
            check_codec(codec)
            if count < 1:
                raise ConfigError(f"a part has at least one tensor, got {count}")
        if not self.parts:
            raise ConfigError("parts must name at least one codec, got none")

    @property
    def linear(self) -> bool:
        """Never: bodies of several formats are gathered."""
        return False

    def arithmetic(self, device: torch.device) -> str:
        """That of the first part that has any."""
        return next(filter(None, (codec.arithmetic(device) for _, codec in self.parts)), "")

    def encode(self, tensors: Sequence[Tensor], *, round: int = 0, spare: int = 0) -> Payload:
        """Every part by its own codec."""
        assert spare == 0, "only linear codecs leave room behind a message"
        return Payload(torch.cat([framed(c, c.encode(some, round=round), some) for c, some in self._dealt(tensors)]))

    def encode_finite(self, tensors: Sequence[Tensor], *, round: int = 0) -> tuple[Payload, bool]:
        """The message, and whether all that receivers will read in it is finite."""
        made = [(codec, some, *codec.encode_finite(some, round=round)) for codec, some in self._dealt(tensors)]
        return Payload(torch.cat([framed(c, body, some) for c, some, body, _ in made])), all(finite for *_, finite in made)

    def decode(self, payload: Payload, like: Sequence[Tensor], *, round: int = 0) -> list[Tensor]:
        """The tensors of all parts."""
        found: list[Tensor] = []
        for (codec, some), body in zip(self._dealt(like), self._bodies(payload, like), strict=True):
            found += codec.decode(body, some, round=round)
        return found

    def combine(self, messages: Messages) -> list[Tensor]:
        """The mean of the messages of all workers, part by part; norms that `mean` may limit are those of a part."""
        found: list[Tensor] = []
        columns = zip(*(self._bodies_of(messages, nth) for nth in range(len(messages.payloads))), strict=True)
        for (codec, some), bodies in zip(self._dealt(messages.like), columns, strict=True):
            found += codec.combine(replace(messages, payloads=bodies, like=some))
        return found

    def nbytes(self, like: Sequence[Tensor]) -> int:
        """The sum over the parts."""
        return sum(framed_nbytes(codec, some) for codec, some in self._dealt(like))

    def _dealt(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Codec, Sequence[Tensor]]]:
        """Each part's codec with its tensors."""
        needed = sum(count for count, _ in self.parts)
        if needed != len(tensors):
            raise ConfigError(f"{self!r} is for {needed} tensors, got {len(tensors)}")
        start = 0
        for count, codec in self.parts:
            yield codec, tensors[start : start + count]
            start += count

    def _bodies_of(self, messages: Messages, nth: int) -> list[Payload]:
        try:
            return list(self._bodies(messages.payloads[nth], messages.like))
        except WireError as error:
            raise WireError(str(error), rank=messages.whose(nth)) from None

    def _bodies(self, payload: Payload, like: Sequence[Tensor]) -> Iterator[Payload]:
        raw = payload.raw()
        if raw.numel() != self.nbytes(like):
            raise WireError(f"a message of {raw.numel()} bytes, where these shapes and {self!r} make {self.nbytes(like)}")
        start = 0
        for codec, some in self._dealt(like):
            length = framed_nbytes(codec, some)
            yield unframed(codec, payload.like(raw[start : start + length].clone()), some)  # a copy: numbers must be aligned
            start += length


def framed_nbytes(codec: Codec, like: Sequence[Tensor]) -> int:
    """Length in bytes of what `framed` gives."""
    return codec.nbytes(like) + PART_NBYTES * codec.linear


def frames_of(codec: Codec, like: Sequence[Tensor]) -> list[tuple[int, int]] | None:
    """Where each part of what `framed` gives begins and ends; None where that is not known."""
    if isinstance(codec, Parts):
        frames, at = list[tuple[int, int]](), 0
        for inner, some in codec._dealt(like):
            if (found := frames_of(inner, some)) is None:
                return None
            frames += [(at + start, at + stop) for start, stop in found]
            at = frames[-1][1]
        return frames
    if codec.linear or isinstance(codec, Dense):
        return [(0, framed_nbytes(codec, like))]
    if isinstance(codec, Chain | Stage):
        return [(part.start, part.stop) for part in Chain.of(codec).plan(like).parts]
    return None


def _told(codec: Codec, like: Sequence[Tensor]) -> tuple[int, int, int]:
    """Blocks, length and value format in the header of a linear codec's part."""
    values = codec.wire_dtype if isinstance(codec, Dense) else Chain.of(codec).values.format_key
    blocks = dense_blocks(like) if isinstance(codec, Dense) else Chain.of(codec).plan(like).blocks
    return blocks, codec.nbytes(like), VALUE_FORMATS.number(values, default=0)


def unframed(codec: Codec, body: Payload, like: Sequence[Tensor]) -> Payload:
    """The body that `framed` was given; a `WireError` where the header of its part is not what it must be."""
    if not codec.linear:
        return body
    same_part(part_header(0, *_told(codec, like)), body.data[:PART_NBYTES].cpu().numpy())
    return body.like(body.data[PART_NBYTES:])


def framed(codec: Codec, body: Payload, like: Sequence[Tensor]) -> Tensor:
    """A body in parts; that of a linear codec, which has none by itself, in one."""
    raw = body.raw()
    if not codec.linear:
        return raw
    blocks, _, values = _told(codec, like)
    return in_one_part(torch.cat([raw.new_empty(PART_NBYTES), raw]), blocks=blocks, values=values)
