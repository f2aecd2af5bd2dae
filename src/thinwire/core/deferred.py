"""Gates that stay on the device: off the CPU, whether a step or a round takes place is decided where the numbers are.

To look at a number on a GPU makes the host wait until the GPU has done all that it was given. So nobody looks. A step is taken
and then selected: every tensor that it may have changed becomes `torch.where(refused, old, new)`. (Not a product of values: NaN
times 0 is NaN.) What was decided is copied to the host beside the work that follows, and read when the next step begins:

    step t      | is the gradient finite? step, or not | round: is what arrived finite? apply, or not | copy what was decided
    step t + 1  | read it: counters, the culprit's name, refusals | ...

So what the host keeps (counts of steps, which round was the last that took place) is put right before anything uses it, a
worker whose gradient is not finite skips exactly the step that it would have skipped on a CPU, and a round is refused on all
workers alike. What a culprit does after a refused round, such as going back to its anchor, it does a step later than on a CPU.

The price is a copy of what may change, for the time of the step: none where the inner optimizer can leave a step out itself, as
torch's fused Adam and AdamW can.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.codecs.device.chunks import alike
from thinwire.core.exchange import Exchange, Gathered, post
from thinwire.core.offload import Offload, recorded, wait_for
from thinwire.core.on_device import OnDevice, kind_on_device
from thinwire.core.outgoing import Arrived, Outgoing
from thinwire.core.slots import SlotOptimizer
from thinwire.errors import RoundAborted, WireError
from thinwire.kernels import triton
from thinwire.payload import LARGEST, finite_flag
from thinwire.sharding.shards import local

if TYPE_CHECKING:
    from thinwire.core.optimizer import Algorithm
    from thinwire.core.rounds import InFlight, RoundEngine
    from thinwire.core.wrapper import Wrapper

_Act = Callable[[list[float]], None]  # what to do where it was refused, given the numbers that tell for what

log = logging.getLogger("thinwire")


class Later:
    """Numbers on a device that the host reads later, without making the device wait.

    Args:
        numbers: 1-D, of a floating dtype.
    """

    def __init__(self, numbers: Tensor):
        """Begin to copy them."""
        self._host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=numbers.is_cuda)
        self._host.copy_(numbers, non_blocking=True)
        self._copied = recorded(numbers.device)

    def read(self) -> list[float]:
        """The numbers, once they are there; the device goes on with what it was given since."""
        wait_for(self._copied)
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
        for _, some in alike([(t.dtype, t.device) for t in self.tensors]):  # else a GPU copies them one by one
            torch._foreach_copy_([self.before[n] for n in some], [self.tensors[n] for n in some])

    def unless(self, refused: Tensor) -> None:
        """Give the tensors their old values where `refused` (0-d) says so: `torch.where`, for all tensors in a few launches.

        old + (new - old) * accepted of their bits as whole numbers, where every step is exact, whatever the bits stand for. A
        Triton kernel, where there is one, copies the old values instead, and reads nothing but `refused` where it need not.
        """
        pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        both = list(zip(self.tensors, self.before, strict=True))
        if triton.available(refused.device):
            whole = [(new, old) for new, old in both if new.is_contiguous() and old.is_contiguous()]
            triton.restore([new for new, _ in whole], [old for _, old in whole], refused)
            both = [(new, old) for new, old in both if not (new.is_contiguous() and old.is_contiguous())]
        for new, old in both:
            whole = _WHOLE[new.dtype.itemsize]
            news, olds = pairs.setdefault(whole, ([], []))
            news.append(new.view(whole))
            olds.append(old.view(whole))
        for whole, (news, olds) in pairs.items():
            torch._foreach_sub_(news, olds)
            torch._foreach_mul_(news, (~refused).to(whole))
            torch._foreach_add_(news, olds)


_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class HostValues:
    """What an optimizer keeps on the host, to go back to once it is known that a step was left out.

    Args:
        groups: its parameter groups.
        states: what is kept of each parameter.
        offload: what rests on the host, and changes only on the device.
    """

    def __init__(self, groups: list[dict[str, Any]], *states: Mapping[Tensor, dict[str, Any]], offload: Offload | None = None):
        """Remember numbers and counts; tensors on a device are not its affair."""
        self.groups, self.states = groups, states
        away = frozenset() if offload is None else offload.names
        self.settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        self.entries = [
            {p: {k: _ELSEWHERE if k in away else _kept(v) for k, v in of_p.items()} for p, of_p in state.items()}
            for state in states
        ]

    def settle(self) -> None:
        """Forget what did not change: a scheduler may change it before anybody goes back."""
        pairs = zip(self.settings, self.groups, strict=True)
        self.settings = [{k: v for k, v in before.items() if now.get(k) is not v} for before, now in pairs]

    def keep(self, name: str, value: int) -> None:
        """Go back to this value of a counter, which is about to change."""
        for before in self.settings:
            before[name] = value

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


class DeviceGate:
    """What was decided on the device, and is read at the next step.

    Args:
        engine: whose steps and rounds they are.
    """

    def __init__(self, engine: RoundEngine):
        """Nothing is to be read."""
        self.engine = engine
        # Numbers, of which the last one says whether to go back; what to go back to on the host; and what to do then.
        self._decided: list[tuple[Tensor, HostValues, _Act]] = []  # at the step at hand
        self._sent: tuple[Later, list[tuple[int, HostValues, _Act]]] | None = None
        self._due: list[Callable[[], None]] = []  # what is still to be done of what was read

    @classmethod
    def of(cls, engine: RoundEngine) -> Self | None:
        """That of an engine; None on a CPU, and where workers come and go or are sites."""
        opt = engine.opt
        looks = opt.params()[0].device.type == "cpu" or opt.link.elastic is not None or opt.site is not None
        return None if looks else cls(engine)

    # --- Reading ---------------------------------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """At the end of a step: begin to copy what was decided in it, all in one."""
        if self._decided:
            lengths = [(numbers.numel(), kept, act) for numbers, kept, act in self._decided]
            self._sent = Later(torch.cat([numbers for numbers, _, _ in self._decided])), lengths
            self._decided = []

    def settle(self) -> bool:
        """Read what was decided, and act on it: before the next step, and before anybody looks at the state.

        Returns:
            Whether a round was refused.
        """
        self._read()
        due, self._due, aborted = self._due, [], self.engine.aborted
        for act in due:
            act()
        return self.engine.aborted > aborted

    def settle_alone(self) -> None:
        """Likewise on one worker alone: where all act together on a refusal, that waits for the next step, and only that."""
        if "param" not in self.engine.opt.replicated or self.engine.opt.peers.size == 1:
            self.settle()
        else:
            self._read()

    def _read(self) -> None:
        """Read what was decided, and put right what the host keeps."""
        self.hand_over()
        if self._sent is None:
            return
        (later, lengths), self._sent = self._sent, None
        numbers, refused = later.read(), []
        for length, kept, act in lengths:
            if numbers[length - 1]:
                refused.append(kept)
                self._due.append(partial(act, numbers[:length]))
            numbers = numbers[length:]
        for kept in reversed(refused):
            kept.restore()

    def forget(self) -> None:
        """What was decided is of another state: one was loaded."""
        self._decided, self._sent, self._due = [], None, []

    # --- Local steps -----------------------------------------------------------------------------------------------------

    def local_step(self, opt: Wrapper) -> None:
        """One step of the inner optimizer; on the device it is left out where this worker's gradient is not finite."""
        invalid = ~_finite_gradients(opt)
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
        self._decided.append((invalid.float().reshape(1), kept, partial(self._step_was_skipped, number)))

    def _step_was_skipped(self, number: int, _: list[float]) -> None:
        log.warning("rank %d, step %d: NaN or Inf in the gradient, local step skipped", self.engine.opt.peers.id, number)

    def send_if_finite(self, opt: Algorithm) -> None:
        """For methods that send gradients: where this worker's are not finite its message says so, and counts are put right."""
        invalid = self.engine.invalid_next = ~_finite_gradients(opt)
        self._decided.append((invalid.float().reshape(1), HostValues([], opt.own_state), lambda _: None))

    # --- Rounds ----------------------------------------------------------------------------------------------------------

    def post(self, outgoing: Outgoing, **how: Any) -> Exchange:
        """Put a message on its way; one whose gate stays on the device where its codec allows it."""
        opt = self.engine.opt
        kind = kind_on_device(outgoing, opt.link)
        if kind is None or (self.engine.tau and issubclass(kind, Gathered)):  # which may be asked for again
            return post(opt.link, outgoing, **how)
        before = Selected(t for name in opt.changed_by_sending for t in opt.slot(name))
        exchange = kind(opt.link, outgoing, **how)
        before.unless(exchange.invalid)
        return exchange

    def apply(self, flight: InFlight, arrived: Arrived) -> None:
        """Apply a round, and take it back on the device where it is refused."""
        opt, exchange = self.engine.opt, flight.exchange
        assert isinstance(exchange, OnDevice) and arrived.refused is not None
        told, synced = partial(exchange.refusal_of, flight.number, exchange.peers), opt.steps - opt.pending_steps
        inner = None if opt.rounds_leave_inner else getattr(opt, "inner", None)
        states = [opt.own_state, *([] if inner is None else [inner.state])]
        before = Selected(_on_device(opt.params(), [entries for state in states for entries in state.values()]))
        kept = HostValues(opt.param_groups, *states, offload=opt.offload)
        self._decided.append((exchange.verdict, kept, partial(self._round_was_refused, flight, told)))
        self.engine.apply(flight, replace(arrived, refused=None))
        before.unless(arrived.refused)
        kept.settle()
        kept.keep("thinwire_synced", synced)

    def _round_was_refused(
        self, flight: InFlight, told: Callable[[list[float]], RoundAborted | WireError], verdict: list[float]
    ) -> None:
        self.engine.begin(flight)
        refusal = told(verdict)
        if isinstance(refusal, WireError):
            raise refusal
        self.engine.refuse(refusal, number=flight.number, step=flight.step)


def _finite_gradients(opt: SlotOptimizer) -> Tensor:
    """`SlotOptimizer.gradients_finite` as a 0-d tensor on the device, which nobody has looked at."""
    found = finite_flag([local(p.grad) for p in opt._active if p.grad is not None], LARGEST)
    found = torch.ones((), dtype=torch.bool, device=opt.params()[0].device) if found is None else found
    return ~opt.shards.any(~found)


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
