"""Gates that stay on the device: off the CPU, whether a step or a round takes place is decided where the numbers are.

To look at a number on a GPU makes the host wait until the GPU has done all that it was given. So nobody looks. A step is taken and
then selected: every tensor that it may have changed becomes `torch.where(valid, new, old)`. (Not a product: NaN times 0 is NaN.)
What was decided is copied to the host beside the work that follows, and read when the next step begins:

    step t      | is the gradient finite? | step, or not | round: send, mean, is it finite? apply, or not | copy what was decided
    step t + 1  | read it: counters, the culprit's name, refusals | ...

So what the host keeps (counts of steps, which round was the last that took place) is put right before anything uses it, a worker
whose gradient is not finite skips exactly the step that it would have skipped on a CPU, and a round is refused on all workers
alike. What a culprit does after a refused round, such as going back to its anchor, it does one step later than on a CPU.

The price is a copy of what may change, for the time of the step: none where the inner optimizer can leave a step out itself, as
torch's fused Adam and AdamW can.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.codecs.dense import Dense
from thinwire.core.exchange import Exchange, Reduced, post, refusal
from thinwire.core.outgoing import Arrived, Outgoing
from thinwire.errors import LinkError
from thinwire.links.base import Peers
from thinwire.payload import Payload, finite_flag
from thinwire.sharding.shards import local

if TYPE_CHECKING:
    from thinwire.core.rounds import InFlight, RoundEngine
    from thinwire.core.wrapper import Wrapper
    from thinwire.network import Op

log = logging.getLogger("thinwire")

PATIENCE = 600.0  # seconds that the device may take for what it was given one step ago


class Later:
    """Numbers on a device that the host reads later, without making the device wait.

    Args:
        numbers: 1-D, of a floating dtype.
    """

    def __init__(self, numbers: Tensor):
        """Begin to copy them."""
        self._host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=numbers.is_cuda)
        self._host.copy_(numbers, non_blocking=True)
        self._copied = torch.Event(device=numbers.device)
        self._copied.record(torch.accelerator.current_stream(numbers.device) if torch.accelerator.is_available() else None)

    def read(self) -> list[float]:
        """The numbers, once they are there; the device goes on with what it was given since."""
        deadline = time.monotonic() + PATIENCE
        while not self._copied.query():
            if time.monotonic() > deadline:
                raise LinkError(f"the device has not ended the step before within {PATIENCE:g} s: does a worker take no part?")
            time.sleep(1e-4)
        return self._host.tolist()


class Selected:
    """Tensors as they are, to go back to on the device.

    Args:
        tensors: that may change.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        """Copy them."""
        self.tensors = list(tensors)
        self.before = [torch.empty_like(t) for t in self.tensors]
        if self.tensors:
            torch._foreach_copy_(self.before, self.tensors)

    def unless(self, refused: Tensor) -> None:
        """Give the tensors their old values where `refused` (0-d) says so."""
        for new, old in zip(self.tensors, self.before, strict=True):
            torch.where(refused, old, new, out=new)


class HostValues:
    """What an optimizer keeps on the host, to go back to once it is known that a step was left out.

    Args:
        groups: its parameter groups.
        states: what is kept of each parameter.
    """

    def __init__(self, groups: list[dict[str, Any]], *states: Mapping[Tensor, dict[str, Any]]):
        """Remember numbers and counts; tensors on a device are not its affair."""
        self.groups, self.states = groups, states
        self.settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        self.entries = [{p: {k: _kept(v) for k, v in of_p.items()} for p, of_p in state.items()} for state in states]

    def settle(self) -> None:
        """Forget what did not change: a scheduler may change it before anybody goes back."""
        pairs = zip(self.settings, self.groups, strict=True)
        self.settings = [{k: v for k, v in before.items() if now.get(k) is not v} for before, now in pairs]

    def restore(self) -> None:
        """Go back."""
        for before, group in zip(self.settings, self.groups, strict=False):
            group.update(before)
        for state, before in zip(self.states, self.entries, strict=True):
            for p, entries in list(state.items()):
                _restore(entries, before.get(p, {}))


def _restore(entries: dict[str, Any], before: Mapping[str, Any]) -> None:
    for key in [k for k in entries if k not in before]:  # made at the step that was left out
        del entries[key]
    for key, value in before.items():
        if isinstance(value, Tensor):
            entries[key].copy_(value)
        elif value is not _ELSEWHERE:
            entries[key] = value


_ELSEWHERE = object()  # stands for a tensor on a device


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone() if value.device.type == "cpu" else _ELSEWHERE
    return value


class ReducedOnDevice(Reduced):
    """A dense message that is averaged on the wire, and whose gate nobody looks at.

    Attributes:
        verdict: once it has arrived: the status number of each worker, whether the mean is not finite, whether any shard of this
            worker refuses it.
    """

    verdict: Tensor

    def _encoded(self, largest: float) -> tuple[Payload, Any]:
        out, codec = self.outgoing, self.codec
        body = codec.encode(out.tensors, round=self.round, spare=self.spare)
        finite = finite_flag([body.data], largest)
        invalid = torch.zeros((), dtype=torch.bool, device=body.data.device) if finite is None else ~finite
        if out.want_sent:  # decoded from a copy: the link reduces into the payload's own buffer
            copy = body.like(body.data[: body.data.numel() - self.spare].clone())
            self.sent = codec.decode(copy, out.tensors, round=self.round)
        return body, invalid if out.invalid is None else invalid | out.invalid

    def _message(self, body: Payload, invalid: Any) -> tuple[Payload, Op]:
        data = body.data
        data.masked_fill_(invalid, 0)
        data[data.numel() - self.spare + self.peers.rank] = invalid.to(data.dtype)
        return body, "mean"

    def read(self, payloads: list[Payload]) -> Arrived:
        """What arrived, and on the device whether it is refused."""
        data, spare = payloads[0].data, self.spare
        finite = finite_flag([data])
        assert finite is not None
        told = torch.cat([data[data.numel() - spare :].float(), (~finite).float().reshape(1)])
        refused = self.any_shard((told != 0).any())
        self.verdict = torch.cat([told, refused.float().reshape(1)])
        mean = self.codec.decode(payloads[0].like(data[: data.numel() - spare]), self.like, round=self.round)
        return self._arrived(self.peers.expected, _mean=mean, refused=refused)


class DeviceGate:
    """What was decided on the device, and is read at the next step.

    Args:
        engine: whose steps and rounds they are.
    """

    def __init__(self, engine: RoundEngine):
        """Nothing is to be read."""
        self.engine = engine
        self._decided: list[tuple[Tensor, Callable[[list[float]], None]]] = []  # at the step at hand
        self._sent: tuple[Later, list[tuple[int, Callable[[list[float]], None]]]] | None = None

    @classmethod
    def of(cls, engine: RoundEngine) -> Self | None:
        """That of an engine; None on a CPU, and where messages are looked at steps later or workers come and go."""
        opt = engine.opt
        possible = opt.params()[0].device.type != "cpu" and not engine.tau and opt.link.elastic is None
        return cls(engine) if possible else None

    # --- Reading ---------------------------------------------------------------------------------------------------------

    def _read_later(self, numbers: Tensor, then: Callable[[list[float]], None]) -> None:
        self._decided.append((numbers, then))

    def hand_over(self) -> None:
        """At the end of a step: begin to copy what was decided in it, all in one."""
        if self._decided:
            lengths = [(numbers.numel(), then) for numbers, then in self._decided]
            self._sent = Later(torch.cat([numbers for numbers, _ in self._decided])), lengths
            self._decided = []

    def settle(self) -> bool:
        """Read what was decided, and act on it: before the next step, and before anybody looks at the state.

        Returns:
            Whether a round was refused.
        """
        self.hand_over()
        if self._sent is None:
            return False
        (later, lengths), self._sent = self._sent, None
        numbers, aborted = later.read(), self.engine.aborted
        for length, then in lengths:
            then(numbers[:length])
            numbers = numbers[length:]
        return self.engine.aborted > aborted

    def settle_alone(self) -> None:
        """Likewise on one worker alone: where all workers act together on a refusal, that waits for the next step."""
        if "param" not in self.engine.opt.replicated or self.engine.opt.peers.size == 1:
            self.settle()

    def forget(self) -> None:
        """What was decided is of another state: one was loaded."""
        self._decided, self._sent = [], None

    # --- Local steps -----------------------------------------------------------------------------------------------------

    def local_step(self, opt: Wrapper) -> None:
        """One step of the inner optimizer; on the device it is left out where this worker's gradient is not finite."""
        invalid = ~opt.finite_gradients()
        inner, number = opt.inner, opt.steps
        by_itself = _leaves_out_steps(inner)
        before = None if by_itself else Selected(_on_device(opt.params(), inner.state.values()))
        kept = HostValues(inner.param_groups, inner.state)
        opt.prepare_gradients()
        if by_itself:
            inner.found_inf = invalid.float()  # type: ignore[attr-defined]
        try:
            inner.step()
        finally:
            if by_itself:
                del inner.found_inf  # type: ignore[attr-defined]
        kept.settle()
        if before is not None:
            before.unless(invalid)
        if self.engine.policy.on_nonfinite == "raise":  # all raise together in the next round
            self.engine.invalid_next = self.engine.invalid_next | invalid
        self._read_later(invalid.float().reshape(1), partial(self._local_step_read, kept, number))

    def _local_step_read(self, kept: HostValues, number: int, decided: list[float]) -> None:
        if decided[0]:
            kept.restore()
            log.warning("rank %d, step %d: NaN or Inf in the gradient, local step skipped", self.engine.opt.peers.id, number)

    # --- Rounds ----------------------------------------------------------------------------------------------------------

    def post(self, outgoing: Outgoing, **how: Any) -> Exchange:
        """Put a message on its way; one whose gate stays on the device where its codec allows it."""
        link, codec = self.engine.opt.link, outgoing.codec
        if not (isinstance(codec, Dense) and codec.linear and outgoing.weight is None and outgoing.slots is None):
            return post(link, outgoing, **how)
        return ReducedOnDevice(link, outgoing, **(how | {"any_shard": self.engine.opt.shards.any_on_device}))

    def apply(self, flight: InFlight, arrived: Arrived) -> None:
        """Apply a round, and take it back on the device where it is refused."""
        opt, exchange = self.engine.opt, flight.exchange
        assert isinstance(exchange, ReducedOnDevice) and arrived.refused is not None
        verdict, peers, synced = exchange.verdict, exchange.peers, opt.steps - opt.pending_steps
        states = [opt.own_state, *opt.inner_in_rounds()]
        before = Selected(_on_device(opt.params(), [entries for state in states for entries in state.values()]))
        kept = HostValues(opt.param_groups, *states)
        self.engine.apply(flight, replace(arrived, refused=None))
        before.unless(arrived.refused)
        kept.settle()
        self._read_later(verdict, partial(self._round_read, flight, peers, kept, synced))

    def _round_read(self, flight: InFlight, peers: Peers, kept: HostValues, synced: int, verdict: list[float]) -> None:
        *numbers, overflow, refused = verdict
        if not refused:
            return
        culprits = [peers.expected[place] for place, number in enumerate(numbers) if number != 0]
        kept.restore()
        self.engine.opt.set_counter("thinwire_synced", synced)
        self.engine.begin(flight)
        found = refusal(flight.number, peers, culprits or ([-1] if overflow else []))
        self.engine.refuse(found, number=flight.number, step=flight.step)


def _on_device(params: Iterable[Tensor], states: Iterable[Mapping[str, Any]]) -> Iterable[Tensor]:
    """All tensors of a device among parameters and state."""
    yield from params
    for entries in states:
        for value in entries.values():
            if isinstance(value, Tensor) and value.device.type != "cpu":
                yield local(value)


def _leaves_out_steps(inner: Optimizer) -> bool:
    """Whether an optimizer leaves out a step, on the device, where its `found_inf` says so."""
    return isinstance(inner, torch.optim.Adam) and all(group.get("fused") for group in inner.param_groups)
