"""TwoLevel: a link of links. The processes of a site are joined by a fast link and are one worker on the thin one.

    site 0: 0 1 2 3 ─┐
                     ├─ between: one message per site        inside: gradients averaged at every step, dense
    site 1: 0 1 2 3 ─┘

The optimizer averages gradients over the site before it looks at them, so that all members of a site compute the same from
there on: the same local steps, the same error feedback, the same message. Member 0 of each site sends it on the thin link, and
tells the others of its site what came back. 8 sites of 8 processes so send between sites what 8 workers send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from thinwire.errors import ConfigError, LinkError, RoundAborted, ThinwireError, WireError, check_choice
from thinwire.links.base import Link, Peers, Ticket
from thinwire.links.metered import metered
from thinwire.network import Op, Traffic
from thinwire.payload import Delivery, Payload, once

_ERRORS: tuple[type[ThinwireError], ...] = (RoundAborted, WireError, LinkError)  # that all members of a site raise together
_LONGEST_TEXT = 4096  # bytes of an error that is told inside


class TwoLevel(Link):
    """The end of a link between sites, for one of the processes of a site.

    A worker of this link is a site: `rank` and `size` count sites. Each process reads data of its own: part `data_rank` of
    `data_size`. All sites have the same number of members, and member i of every site is given a `between` to members i of
    the others: on a mesh of processes the two axes.

    Example:
        >>> import thinwire
        >>> link = thinwire.TwoLevel(thinwire.SoloLink(), thinwire.SoloLink())
        >>> link.rank, link.size, link.data_rank, link.data_size
        (0, 1, 0, 1)

    Args:
        inside: joins the members of this process's site. Its timeout should be longer than that of `between`, for which it
            waits.
        between: joins this process to those with the same number in the other sites; only that of member 0 is used.
        wire: in which format gradients are averaged inside: "fp32" or "bf16".

    Attributes:
        inside: the fast link.
        inside_meter: counts what crosses it; the meter of the optimizer counts the thin link.
        between: the thin link.
    """

    def __init__(self, inside: Link, between: Link, *, wire: Literal["fp32", "bf16"] = "fp32"):
        """Join two links."""
        check_choice("wire", wire, ("fp32", "bf16"))
        for name, link in (("inside", inside), ("between", between)):
            if not isinstance(link, Link):
                raise ConfigError(f"{name} must be a thinwire Link, got {type(link).__name__}")
            if link.elastic is not None:
                raise ConfigError(
                    f"{name} is an elastic link, whose workers come and go: a site that loses the member that sends for it "
                    "would stop. Take a TorchLink, or let each machine join the elastic run as a worker of its own"
                )
            if link.two_level is not None:
                raise ConfigError(f"{name} is a TwoLevel link itself: there are two levels, not three")
        self.inside, self.inside_meter = metered(inside)
        self.between, self.wire = between, wire

    @property
    def rank(self) -> int:
        """The number of this process's site."""
        return self.between.rank

    @property
    def size(self) -> int:
        """How many sites there are."""
        return self.between.size

    @property
    def two_level(self) -> TwoLevel:
        """This link."""
        return self

    @property
    def data_rank(self) -> int:
        """This process's number among all processes of all sites."""
        return self.rank * self.inside.size + self.inside.rank

    @property
    def data_size(self) -> int:
        """How many processes all sites have together."""
        return self.size * self.inside.size

    @property
    def sends(self) -> bool:
        """Whether this process sends for its site."""
        return self.inside.rank == 0

    def peers(self) -> Peers:
        """The sites."""
        return self.between.peers()

    def post(self, payload: Payload, op: Op) -> Ticket:
        """Post on the thin link, by the member that sends; the others hear of the result when they wait for it."""
        return _TwoLevelTicket(self, payload, self.between.post(payload, op) if self.sends else None)

    def commit(self) -> None:
        """Commit on the thin link; what the member that sends finds, all members of its site raise."""
        error = None
        if self.sends:
            try:
                self.between.commit()
            except _ERRORS as found:
                error = found
        self.tell([], error)

    def tell(self, result: list[Payload], error: ThinwireError | None, like: Payload | None = None) -> list[Payload]:
        """Give all members of the site what the one that sends has got, or raise on all of them what it has met.

        Args:
            result: of the member that sends.
            error: what it raises; one of `RoundAborted`, `WireError` and `LinkError`.
            like: this process's own message of the exchange, which tells how long an answer may be.
        """
        if self.inside.size == 1:
            if error is not None:
                raise error
            return result
        room = max(2, self.size)
        text = b"" if error is None else str(error).encode()[:_LONGEST_TEXT]
        kind = 0 if error is None else 1 + next(i for i, known in enumerate(_ERRORS) if isinstance(error, known))
        about = _whose(error)  # of an error; its text stands in the first message of as many
        lengths = [p.nbytes for p in result] if error is None else [len(text)] + [0] * (len(about) - 1)
        senders = [-1 if p.sender is None else p.sender for p in result] if error is None else about
        head = torch.zeros(2 + 2 * room, dtype=torch.int64)
        head[: 2 + 2 * len(lengths)] = torch.tensor([kind, len(lengths), *lengths, *senders])
        told = self._broadcast(head.view(torch.uint8)).data.cpu().view(torch.int64).tolist()
        kind, count = told[:2]
        most = _LONGEST_TEXT if kind or like is None else max(like.nbytes, like.longest, *like.due)
        if not (0 <= kind <= len(_ERRORS) and 0 <= count <= room and all(0 <= n <= most for n in told[2 : 2 + count])):
            raise WireError(f"a result of kind {kind} with {count} messages, at most {room} of {most} bytes can be", rank=0)
        lengths, senders = told[2 : 2 + count], told[2 + count : 2 + 2 * count]
        body = self._body(result, text, sum(lengths), like)
        if error is not None:
            raise error
        if kind:
            text = body.data.cpu().numpy().tobytes()
            raise _error(_ERRORS[kind - 1], f"the member that sends for this site: {text.decode(errors='replace')}", senders)
        return result if self.sends or like is None else _messages(body, lengths, senders, like)

    def _body(self, result: Sequence[Payload], text: bytes, nbytes: int, like: Payload | None) -> Payload:
        """What stands in all messages of a result, one after the other, on all members."""
        device = "cpu" if like is None else like.data.device
        if not nbytes or not self.sends:
            empty = Payload(torch.empty(nbytes, dtype=torch.uint8, device=device))
            return self._broadcast(empty.data) if nbytes else empty
        if text:
            return self._broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        return self._broadcast(_joined(result), result if isinstance(result, Delivery) else None)

    def _broadcast(self, data: torch.Tensor, of: Delivery | None = None) -> Payload:
        return self.inside.broadcast(Payload(data, purpose="site result", of_several=of))

    def tick(self) -> None:
        """Count a step on the thin link."""
        self.between.tick()

    def now(self) -> float:
        """The clock of the thin link."""
        return self.between.now()

    def elapse(self, seconds: float) -> None:
        """Let time pass on the thin link."""
        self.between.elapse(seconds)

    def traffic(self, op: Op, sizes: Sequence[int]) -> Traffic:
        """As the thin link counts it; nothing on the members that do not send."""
        return self.between.traffic(op, sizes) if self.sends else Traffic(0, 0)

    def straight_traffic(self, dealt: Sequence[int], due: Sequence[int]) -> Traffic:
        """As the thin link counts it; nothing on the members that do not send."""
        return self.between.straight_traffic(dealt, due) if self.sends else Traffic(0, 0)


def _whose(error: ThinwireError | None) -> list[int]:
    """Whom an error is about: the sites that are lost, or the one whose message it is; -1 where nobody is named."""
    if isinstance(error, LinkError):
        return list(error.lost) or [-1]
    return [error.rank] if isinstance(error, WireError) and error.rank is not None else [-1]


def _error(kind: type[ThinwireError], text: str, whose: Sequence[int]) -> ThinwireError:
    """An error as the member that sends has it: its text names whom it is about, and so do its attributes."""
    named = [site for site in whose if site >= 0]
    if kind is LinkError:
        return LinkError(text, lost=named)
    error = kind(text)
    if isinstance(error, WireError) and named:
        error.rank = named[0]
    return error


def _joined(messages: Sequence[Payload]) -> torch.Tensor:
    """All bytes, one message after the other; made once where several workers of this process have them."""
    return once(messages, "joined", lambda: torch.cat([p.raw() for p in messages]))


def _messages(body: Payload, lengths: Sequence[int], senders: Sequence[int], like: Payload) -> list[Payload]:
    """The messages of a result, as the member that sends has them; in the simulator those very ones."""
    if (several := body.of_several) is not None and torch.equal(_joined(several), body.data):
        return several
    found = []
    for part, sender in zip(body.data.split(list(lengths)), senders, strict=True):
        # A copy where the place in the buffer may be odd for the dtype.
        message = like.like(part if like.data.dtype == torch.uint8 else part.clone().view(like.data.dtype))
        found.append(message if sender < 0 else message.of(sender))
    return found


class _TwoLevelTicket(Ticket):
    def __init__(self, link: TwoLevel, payload: Payload, ticket: Ticket | None):
        self.link, self.payload, self.ticket = link, payload, ticket

    def _finish(self) -> list[Payload]:
        result: list[Payload] = []
        error = None
        if self.ticket is not None:
            try:
                result = self.ticket.wait()
            except _ERRORS as found:
                error = found
        return self.link.tell(result, error, self.payload)
