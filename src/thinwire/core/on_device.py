"""Exchanges whose gates stay on the device: what arrives, and whether it is refused, are tensors that nobody has looked at.

They send the messages that those of `exchange` send and refuse the rounds that those refuse; `deferred` reads their verdict
when the next step begins. Where a link moves messages from device to device, workers that could not read those of others tell
so in a byte that travels likewise. Other links bring messages into the memory of the host: what was damaged on the way is found
there, and what else is wrong with a message is wrong on all workers alike.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs.base import Messages
from thinwire.codecs.chain import Chain, Stage
from thinwire.codecs.dense import Dense
from thinwire.codecs.device.backend import on_device
from thinwire.codecs.device.decoder import DeviceReceived
from thinwire.codecs.device.envelope import open_all, seal_unless
from thinwire.codecs.device.fused_decoder import read_on_device
from thinwire.codecs.wire import HEADER_NBYTES
from thinwire.core.exchange import Exchange, Gathered, Reduced
from thinwire.core.outgoing import Arrived, Outgoing
from thinwire.core.refusals import damaged, refusal
from thinwire.errors import RoundAborted, WireError
from thinwire.links.base import Link, Peers
from thinwire.network import Op
from thinwire.payload import Payload, finite_flag


class OnDevice(Exchange):
    """A message in flight, on a device.

    Attributes:
        invalid: whether this worker's contribution is invalid, 0-d.
        verdict: once the messages have arrived: what `refusal_of` reads; the last number says whether the round is refused.
    """

    invalid: Tensor
    verdict: Tensor

    @staticmethod
    @abstractmethod
    def refusal_of(number: int, peers: Peers, verdict: list[float]) -> RoundAborted | WireError:
        """What a round was refused for, once its verdict was read."""

    def _known_invalid(self, invalid: Tensor) -> Tensor:
        """With what is said of the contribution in advance, and what other shards of this worker say of theirs."""
        said = self.outgoing.invalid
        self.invalid = self.any_shard(invalid if said is None or said is False else invalid | said)
        return self.invalid


class ReducedOnDevice(OnDevice, Reduced):
    """A dense message that is averaged on the wire."""

    def _encoded(self, largest: float) -> tuple[Payload, Any]:
        out, codec = self.outgoing, self.codec
        body = codec.encode(out.tensors, round=self.round, spare=self.spare)
        finite = finite_flag([body.data], largest)
        assert finite is not None, "there is a status number at least"
        if out.want_sent:  # decoded from a copy: the link reduces into the payload's own buffer
            copy = body.like(body.data[: body.data.numel() - self.spare].clone())
            self.sent = codec.decode(copy, out.tensors, round=self.round)
        return body, ~finite

    def _message(self, body: Payload, invalid: Any) -> tuple[Payload, Op]:
        data, invalid = body.data, self._known_invalid(invalid)
        data.masked_fill_(invalid, 0)
        data[data.numel() - self.spare + self.peers.rank] = invalid.to(data.dtype)
        return body, "mean"

    def read(self, payloads: list[Payload]) -> Arrived:
        """What arrived, and whether it is refused."""
        data, spare = payloads[0].data, self.spare
        finite = finite_flag([data])
        assert finite is not None
        told = torch.cat([data[data.numel() - spare :].float(), (~finite).float().reshape(1)])
        refused = self.any_shard((told != 0).any())
        self.verdict = torch.cat([told, refused.float().reshape(1)])
        mean = self.codec.decode(payloads[0].like(data[: data.numel() - spare]), self.like, round=self.round)
        return self._arrived(self.peers.expected, _mean=mean, refused=refused)

    @staticmethod
    def refusal_of(number: int, peers: Peers, verdict: list[float]) -> RoundAborted | WireError:
        """Whose status number is raised, or that the sum is not finite."""
        *numbers, overflow, _ = verdict
        culprits = [peers.expected[place] for place, told in enumerate(numbers) if told != 0]
        return refusal(number, peers, culprits or ([-1] if overflow else []))


class GatheredOnDevice(OnDevice, Gathered):
    """A message of a chain that all workers send to each other, of slots or of tensors that are made piece by piece."""

    to_vote = False

    def __init__(self, link: Link, outgoing: Outgoing, **how: Any):
        """Encode the message and post it."""
        self.link = link
        super().__init__(link, outgoing, **how)

    def _encoded(self, largest: float) -> tuple[Payload, Any]:
        out, chain = self.outgoing, Chain.of(self.codec)
        if out.slots is not None:
            looked = out.slots if out.invalid is None and out.scale is None else []
            how = {"decay": out.decay, "scale": out.scale, "made": out.made}
            encoded = chain.encode_slots(out.slots, out.tensors, round=self.round, **how)
        else:
            assert out.made is not None
            looked = [t.detach() for source in out.made.sources for t in source]
            encoded = chain.encode_tensors(out.made, round=self.round)
        finite, told = torch.as_tensor(encoded.finite), finite_flag(looked, largest)
        # Of slots, nothing of the model travels along: it is in them by now.
        self.outgoing = replace(out, tensors=self.like, made=None if out.slots is not None else out.made)
        self.codec, self.encoded = chain, encoded
        return encoded.payload, ~finite if told is None else ~(finite & told)

    def _message(self, body: Payload, invalid: Any) -> tuple[Payload, Op]:
        assert self._frames is not None, "those of a chain are known"
        how = {"fingerprint": self._fingerprint, "round": self.round, "parts": len(self._frames)}
        return seal_unless(self._known_invalid(invalid), body, self._envelope(invalid=False), **how), "gather"

    def read(self, payloads: list[Payload]) -> Arrived:
        """What arrived, and whether it is refused."""
        ids = self.peers.expected
        assert self._frames is not None
        if any(p.nbytes != self.posted.nbytes for p in payloads):  # a link brings messages of one length
            raise WireError(f"messages of {[p.nbytes for p in payloads]} bytes, where all have {self.posted.nbytes}")
        raw = torch.stack([p.data for p in payloads])
        opened = open_all(raw, ids, self._frames, fingerprint=self._fingerprint, round=self.round)
        received = self._read_on_device([p.like(p.data[HEADER_NBYTES:]) for p in payloads])
        wrong = opened.wrong | received.wrong | (opened.weights != 1)
        unread = self._told_all(wrong.any() & ~opened.invalid.any())
        unsafe = ~received.safe
        refused = self.any_shard(opened.invalid.any() | unread.any() | unsafe)
        self.verdict = torch.cat([opened.invalid, wrong, unread, unsafe.reshape(1), refused.reshape(1)]).float()
        return self._arrived(ids, _received=received, refused=refused)

    def _read_on_device(self, bodies: list[Payload]) -> DeviceReceived:
        assert isinstance(self.codec, Chain)
        messages = Messages(bodies, self.like, self.round, self.outgoing.mean, None, self.peers.expected)
        return read_on_device(self.codec, self.codec.plan(self.like), messages, raises=False)

    def _told_all(self, unread: Tensor) -> Tensor:
        """Which workers could not read the messages, [workers]: what one could not, no worker may apply."""
        unread = self.any_shard(unread)
        if self.peers.size == 1:
            return unread.reshape(1)
        told = self.link.all_gather(Payload(unread.to(torch.uint8).reshape(1), purpose="vote"))
        return torch.cat([p.data for p in told]) != 0

    @staticmethod
    def refusal_of(number: int, peers: Peers, verdict: list[float]) -> RoundAborted | WireError:
        """Who says that its contribution is invalid, who could not read the messages, or that the sum could overflow."""
        size, ids = peers.size, peers.expected
        invalid, wrong, unread = ([ids[n] for n in range(size) if verdict[at + n]] for at in range(0, 3 * size, size))
        if invalid:
            return refusal(number, peers, invalid)
        if unread:
            return damaged(number, unread, size, WireError("a message that is not sound", rank=wrong[0]) if wrong else None)
        return refusal(number, peers, [-1] if verdict[-2] else [])


class GatheredThroughHost(GatheredOnDevice):
    """The same over a link that moves the host's memory: one copy out, and one in once the messages are known to be whole."""

    to_vote = True

    def _message(self, body: Payload, invalid: Any) -> tuple[Payload, Op]:
        sealed, op = super()._message(body, invalid)
        self.device = sealed.data.device
        return sealed.like(_to_host(sealed.data)), op

    def read(self, payloads: list[Payload]) -> Arrived:
        """What arrived, and whether it is refused; who says that its contribution is invalid is known at once."""
        bodies, _, culprits = self._open(payloads)
        if culprits:
            raise refusal(self.round, self.peers, culprits)
        raw = _stacked([body.data for body in bodies], self.device)
        received = self._read_on_device([body.like(one) for body, one in zip(bodies, raw, strict=True)])
        unsafe = ~received.safe
        refused = self.any_shard(received.wrong.any() | unsafe)
        self.verdict = torch.cat([received.wrong, unsafe.reshape(1), refused.reshape(1)]).float()
        return self._arrived(self.peers.expected, _received=received, refused=refused)

    @staticmethod
    def refusal_of(number: int, peers: Peers, verdict: list[float]) -> RoundAborted | WireError:
        """Whose message is not sound, or that the sum could overflow."""
        if wrong := [sender for sender, flag in zip(peers.expected, verdict, strict=False) if flag]:
            return WireError("a message that is not sound", rank=wrong[0])
        return refusal(number, peers, [-1] if verdict[-2] else [])


def _to_host(message: Tensor) -> Tensor:
    """A copy of a message on the host, in pinned memory where it comes from a GPU: several times as fast as pageable memory."""
    if not message.is_cuda:
        return message.cpu()
    return torch.empty(message.shape, dtype=message.dtype, device="cpu", pin_memory=True).copy_(message)


def _stacked(messages: list[Tensor], device: torch.device) -> Tensor:
    """Messages of equal length, one below the other on a device; on their way to a GPU in pinned memory."""
    if device.type != "cuda":
        return torch.stack(messages).to(device)
    host = torch.empty((len(messages), messages[0].numel()), dtype=messages[0].dtype, device="cpu", pin_memory=True)
    return torch.stack(messages, out=host).to(device, non_blocking=True)


def kind_on_device(outgoing: Outgoing, link: Link) -> type[OnDevice] | None:
    """The exchange of a message whose gate can stay on the device; None where the host has to look."""
    codec, by_pieces = outgoing.codec, outgoing.slots is not None or outgoing.made is not None
    if outgoing.weight is not None or outgoing.pair is not None:
        return None
    if isinstance(codec, Dense) and codec.linear and not by_pieces:
        return ReducedOnDevice
    if not by_pieces or codec.linear or not isinstance(codec, Chain | Stage):
        return None
    if not on_device(Chain.of(codec), (outgoing.slots or outgoing.tensors)[0].device):
        return None
    return GatheredOnDevice if link.moves_devices else GatheredThroughHost
