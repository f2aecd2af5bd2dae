"""Chain: transform >> selection >> values, the codec of the sparse methods.

    DCT(64) >> TopK(32) >> Sign()        DeMo with one bit per value
    TopK(64) >> TwoBit()                 SparseLoCo
    RandomK(0.05) >> Float("bf16")       FlexDeMo's random scheme: no indices, averaged on the wire
    Fp4()                                Streaming DiLoCo's wire

A chain has at most one stage of each kind, in this order. Each stage is a codec by itself too: the chain in which the others do
nothing. Those that do nothing, `Identity`, `All` and `Float`, are here; the others are in `transforms`, `selection` and
`values`. `message_plan` tells where everything is in a message, `encoder` makes it, `decoder` reads it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs import encoder
from thinwire.codecs.base import Codec, Messages
from thinwire.codecs.bits import Bytes
from thinwire.codecs.decoder import Received
from thinwire.codecs.dense import WIRE_DTYPES, Dense
from thinwire.codecs.device import encoder as device_encoder
from thinwire.codecs.device import fused
from thinwire.codecs.device.backend import on_device
from thinwire.codecs.device.fused_decoder import read_on_device
from thinwire.codecs.device.values import FORMATS
from thinwire.codecs.device.values import Floats as DeviceFloats
from thinwire.codecs.encoder import Encoded, PerTensor
from thinwire.codecs.layout import Shape
from thinwire.codecs.made import Made
from thinwire.codecs.message_plan import Plan, plan_of, shapes_of
from thinwire.codecs.stages import RUN, Floats, Indices, Row, Selection, Stages, Transform, Values, finite
from thinwire.codecs.wire import MOST_PARTS, PART_NBYTES, check_part, same_part
from thinwire.errors import ConfigError, WireError, check_choice, check_whole_number
from thinwire.payload import Payload


class Stage(Codec):
    """Base of transforms, selections and value formats; `a >> b` makes a chain of them."""

    @property
    def chain(self) -> Chain:
        """The chain of this stage alone."""
        return Chain.of(self)

    def __rshift__(self, after: Codec) -> Chain:
        check_order(self, after)
        return self.chain >> after

    def __repr__(self) -> str:
        """As it would be written: the first setting always, the others where they differ from the default."""
        first, *others = fields(self)  # pyright: ignore[reportArgumentType]
        told = [f"{f.name}={getattr(self, f.name)!r}" for f in others if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join([*self._shown(getattr(self, first.name)), *told])})"

    def _shown(self, first: object) -> list[str]:
        return [repr(first)]

    @property
    def linear(self) -> bool:
        """See `Chain`."""
        return self.chain.linear

    @property
    def sparse(self) -> bool:
        """See `Chain`."""
        return self.chain.sparse

    def encode(self, tensors: Sequence[Tensor], *, round: int = 0, spare: int = 0) -> Payload:
        """See `Chain`."""
        return self.chain.encode(tensors, round=round, spare=spare)

    def encode_finite(self, tensors: Sequence[Tensor], *, round: int = 0) -> tuple[Payload, bool]:
        """See `Chain`."""
        return self.chain.encode_finite(tensors, round=round)

    def combine(self, messages: Messages) -> list[Tensor]:
        """See `Chain`."""
        return self.chain.combine(messages)

    def decode(self, payload: Payload, like: Sequence[Tensor], *, round: int = 0) -> list[Tensor]:
        """See `Chain`."""
        return self.chain.decode(payload, like, round=round)

    def nbytes(self, like: Sequence[Tensor]) -> int:
        """See `Chain`."""
        return self.chain.nbytes(like)

    def slot_shapes(self, like: Sequence[Tensor]) -> list[tuple[int, ...]]:
        """See `Chain`."""
        return self.chain.slot_shapes(like)

    def arithmetic(self, device: torch.device) -> str:
        """See `Chain`."""
        return self.chain.arithmetic(device)


# --- Stages that do nothing ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Identity(Transform, Stage):
    """No transform, only blocks: the largest entries themselves are kept (SparseLoCo)."""

    mixes = False

    def basis(self, length: int, round: int) -> None:  # noqa: ARG002
        """Nothing to do."""
        return


@dataclass(frozen=True, repr=False)
class All(Selection, Stage):
    """Everything is sent: what a chain without a selection does."""

    k: int | float = 1  # of no use here
    everything = True

    def _shown(self, first: object) -> list[str]:  # noqa: ARG002
        return []

    def count(self, L: int) -> int:
        """All of them."""
        return L

    def positions(self, L: int, round: int, start: int, stop: int) -> Indices:  # noqa: ARG002
        """All of them."""
        return np.broadcast_to(np.arange(L), (stop - start, L))


@dataclass(frozen=True, repr=False)
class Float(Values, Stage):
    """Floating point numbers without a scale.

    Args:
        dtype: "fp32", "bf16" or "fp16".
    """

    dtype: str = "fp32"

    def __post_init__(self) -> None:
        """Check the name."""
        check_choice("the dtype of Float", self.dtype, ("fp32", "bf16", "fp16"))

    @property
    def wire_dtype(self) -> torch.dtype:
        """The torch dtype."""
        return WIRE_DTYPES[self.dtype]

    @property
    def format_key(self) -> Hashable:
        """Each dtype is a format of its own."""
        return self.wire_dtype

    def nbytes_of(self, row: Row) -> int:
        """Two or four bytes each."""
        return row.count * self.wire_dtype.itemsize

    def write(self, values: Floats, row: Row) -> tuple[Bytes, Floats]:
        """Cast."""
        if not row.count:
            return np.empty(0, np.uint8), values
        cast = torch.from_numpy(values).to(self.wire_dtype)
        return cast.view(torch.uint8).numpy(), cast.float().numpy()

    def read(self, raw: Bytes, row: Row, start: int, stop: int, *, check: bool = True) -> Floats:  # noqa: ARG002
        """Cast back."""
        if stop <= start:
            return np.empty(0, np.float32)
        size = self.wire_dtype.itemsize
        part = raw[start * size : stop * size].copy()  # aligned, and never a view into the message
        values = torch.from_numpy(part).view(self.wire_dtype).float().numpy()
        return finite("value", values) if check else values

    def check(self, raw: Bytes, row: Row) -> float:  # noqa: ARG002
        """The largest magnitude, found among the bits: without the sign they are in the order of the numbers."""
        kind = np.dtype(f"<u{self.wire_dtype.itemsize}")
        bits, most = raw.view(kind), np.zeros(1, kind)
        for at in range(0, len(bits), RUN):
            most[0] = max(most[0], (bits[at : at + RUN] & kind.type((1 << 8 * kind.itemsize - 1) - 1)).max())
        largest = torch.from_numpy(most.view(np.uint8)).view(self.wire_dtype).float().numpy()
        return float(finite("value", largest)[0])


FORMATS[Float] = DeviceFloats


# --- Chains --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Chain(Stages, Codec):
    """At most one transform, one selection and one value format, in this order; `a >> b >> c` reads as it works.

    A tensor of which the kept entries with their indices would take more bytes than all entries in the same value format is
    sent whole, without a transform.

    Args:
        transform: `DCT`, `Hadamard`, `RandomOrthogonal` or `Identity`.
        selection: `TopK`, `RandomK`, `Striding` or `All`.
        values: `Float`, `Int8`, `Fp4`, `TwoBit`, `Ternary` or `Sign`.
        parts: into how many parts a message is cut, with a checksum each; fewer, where there are not so many blocks.
        beside: of a `CodecSchedule`.
    """

    transform: Transform = Identity()
    selection: Selection = All()
    values: Values = Float()
    parts: int = 1
    beside: tuple[Stages, ...] = ()

    def __post_init__(self) -> None:
        """Check the number of parts."""
        check_whole_number("the number of parts of a message", self.parts)
        if self.parts > MOST_PARTS or (self.parts > 1 and self.linear):
            told = "messages that are averaged on the wire have one" if self.linear else f"there are at most {MOST_PARTS}"
            raise ConfigError(f"{self!r} cannot be sent in {self.parts} parts: {told}")

    @staticmethod
    def of(stage: Codec) -> Chain:
        """The chain of one stage, of a dense format that is averaged on the wire, or a chain itself."""
        if isinstance(stage, Chain):
            return stage
        if isinstance(stage, Dense) and stage.linear and stage.wire_dtype != torch.float64:
            return Chain(values=Float(next(name for name, dtype in WIRE_DTYPES.items() if dtype == stage.wire_dtype)))
        for kind, name in _KINDS.items():
            if isinstance(stage, kind):
                only: dict[str, Any] = {name: stage}
                return Chain(**only)
        raise ConfigError(f"a chain is made of {_ORDER}, got {stage!r}")

    def __rshift__(self, after: Codec) -> Chain:
        check_order(self, after)
        return replace(self, **Chain.of(after).stages())

    def split(self, parts: int) -> Chain:
        """The same chain with messages of so many parts, which are read as the same values."""
        return replace(self, parts=parts)

    def stages(self) -> dict[str, Any]:
        """The stages that do something, in order."""
        return {name: stage for name in _KINDS.values() if (stage := getattr(self, name)) != getattr(Chain, name)}

    def __repr__(self) -> str:
        """Equal chains are written alike."""
        text = " >> ".join(map(repr, self.stages().values())) or repr(self.values)
        return text if self.parts == 1 else f"({text}).split({self.parts})"

    @property
    def sparse(self) -> bool:
        """Whether a selection leaves values out."""
        return not self.selection.everything

    def arithmetic(self, device: torch.device) -> str:
        """The kernels in use there, C or Triton, or "off" where torch and numpy transform blocks that the kernels know."""
        return fused.arithmetic(self, device)

    def plan(self, like: Sequence[Tensor]) -> Plan:
        """Where everything is in a message of such tensors."""
        return plan_of(self, shapes_of(like))

    def nbytes(self, like: Sequence[Tensor]) -> int:
        """Known from the shapes alone: every code has a length that does not depend on what it says."""
        return self.plan(like).nbytes

    def slot_shapes(self, like: Sequence[Tensor]) -> list[Shape]:
        """Shape of each tensor in the domain of the transform; its own where that is another domain in each round."""
        return encoder.slot_shapes(self, like)

    def accumulate(
        self, slots: Sequence[Tensor], tensors: Sequence[Tensor], *, decay: PerTensor, scale: PerTensor = 1.0
    ) -> None:
        """Slots <- decay * slots + scale * transform(tensors), in one pass without a copy of the model.

        Args:
            slots: float32, of the shapes that `slot_shapes` tells.
            tensors: of any floating dtype.
            decay: 0 to overwrite whatever the slots held; one number, or one per tensor.
            scale: multiplies the tensors; likewise.
        """
        how = device_encoder if self._on_device(slots) else encoder
        how.accumulate(self, slots, tensors, decay=decay, scale=scale)

    def encode(self, tensors: Sequence[Tensor], *, round: int = 0, spare: int = 0) -> Payload:
        """All tensors in one message."""
        payload = self.encode_tensors(tensors, round=round).payload
        return payload.like(torch.cat([payload.data, payload.data.new_zeros(spare)])) if spare else payload

    def encode_finite(self, tensors: Sequence[Tensor], *, round: int = 0) -> tuple[Payload, bool]:
        """As `encode`, with whether all that receivers will read is finite."""
        encoded = self.encode_tensors(tensors, round=round)
        return encoded.payload, bool(encoded.finite)

    def encode_tensors(
        self, tensors: Sequence[Tensor] | Made, *, round: int = 0, write: encoder.Write | None = None
    ) -> Encoded:
        """As `encode`, with what receivers will read; of tensors that are made piece by piece too."""
        if write is None and self._on_device(tensors):
            return device_encoder.encode_tensors(self, tensors, round=round)
        return encoder.encode_tensors(self, tensors, round=round, write=write)

    def encode_slots(
        self,
        slots: Sequence[Tensor],
        like: Sequence[Tensor],
        *,
        round: int = 0,
        decay: PerTensor = 1.0,
        scale: PerTensor | None = None,
        made: Made | None = None,
        write: encoder.Write | None = None,
    ) -> Encoded:
        """The message of tensors that live in the domain of the transform.

        Args:
            slots: see `accumulate`.
            like: tensors of the shapes they stand for.
            round: number of the round.
            decay: see `accumulate`.
            scale: where it is given, `accumulate(slots, like, decay=decay, scale=scale)` comes first, in the same pass;
                else the slots are not changed.
            made: what is accumulated instead of `like`, made piece by piece.
            write: what writes the bytes, where they are not one message; see `codecs.deal`.
        """
        how: dict[str, Any] = {"round": round, "decay": decay, "scale": scale, "made": made}
        if write is None and self._on_device(slots):
            return device_encoder.encode_slots(self, slots, like, **how)
        return encoder.encode_slots(self, slots, like, write=write, **how)

    def _on_device(self, tensors: Sequence[Tensor] | Made) -> bool:
        """Whether torch operations make messages of tensors where they are; on a CPU numpy and C kernels do."""
        held = tensors.sources[0] if isinstance(tensors, Made) else tensors
        return len(held) > 0 and on_device(self, held[0].device)

    def decode(self, payload: Payload, like: Sequence[Tensor], *, round: int = 0) -> list[Tensor]:
        """The tensors that a message says."""
        return self.combine(Messages([payload], like, round))

    def decode_part(self, part: Payload, like: Sequence[Tensor], *, round: int = 0) -> list[Tensor]:
        """The tensors that one part of a message says, with zeros where other parts have the values.

        Args:
            part: header and contents, as they stand in a message.
            like: tensors of the shapes that were encoded.
            round: the number that was given to `encode`.

        Raises:
            WireError: a part that is damaged, or none of such a message.
        """
        plan, raw = self.plan(like), part.raw()
        if raw.numel() < PART_NBYTES:
            raise WireError(f"part of {raw.numel()} bytes, where its header has {PART_NBYTES}")
        header, first = raw[:PART_NBYTES].cpu().numpy(), int.from_bytes(raw[:8].cpu().numpy().tobytes(), "little")
        due = next((p for p in plan.parts if p.first == first), plan.parts[0])
        same_part(due.header, header)
        if raw.numel() != due.stop - due.start:
            raise WireError(f"part of {raw.numel()} bytes, where these shapes and {self!r} make {due.stop - due.start}")
        check_part(plan.parts.index(due), len(plan.parts), header.tobytes(), raw[PART_NBYTES:])
        rest = self.encode([torch.zeros(t.shape) for t in like], round=round)
        rest.data[due.start : due.stop] = raw.to(rest.data.device)
        return self.decode(rest, like, round=round)

    def combine(self, messages: Messages) -> list[Tensor]:
        """The mean of several messages: combined in the domain of the transform, with one inverse for all."""
        return self.receive(messages).tensors()

    def receive(self, messages: Messages, *, own: tuple[int, Encoded] | None = None) -> Received:
        """Check messages from end to end, to be decoded piece by piece later; see `combine`, and `Received` for `own`.

        Raises:
            WireError: before anything is decoded into tensors.
        """
        plan = self.plan(messages.like)
        if on_device(self, messages.payloads[0].data.device):
            return read_on_device(self, plan, messages)
        return Received(self, plan, messages, own)


def check_order(before: Codec, after: Codec) -> None:
    """Refuse two codecs that cannot follow each other in a chain."""
    if isinstance(after, Dense):
        raise ConfigError(f"a chain is made of {_ORDER}, got {after!r}")

    def places(codec: Codec) -> list[int]:
        parts = codec.stages().values() if isinstance(codec, Chain) else [codec]
        return [i for part in parts for i, kind in enumerate(_KINDS) if isinstance(part, kind)]

    first, second = places(before), places(Chain.of(after) if not isinstance(after, Stage) else after)
    if first and second and second[0] <= first[-1]:
        raise ConfigError(f"{before!r} >> {after!r} is not a chain: {_ORDER}, each at most once and in this order")


_KINDS = {Transform: "transform", Selection: "selection", Values: "values"}
_ORDER = "a transform >> a selection >> a value format"
