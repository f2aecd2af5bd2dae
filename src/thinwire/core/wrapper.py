"""Wrapper: the base of the methods around an inner optimizer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Unpack
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.codecs import Codec, CodecSchedule, Dense
from thinwire.core.exchange import Exchange
from thinwire.core.merged_state import PREFIX, READY, MergedState
from thinwire.core.offload import Offload, Place
from thinwire.core.optimizer import Algorithm, PolicyOptions, Start
from thinwire.core.outgoing import Arrived, Outgoing
from thinwire.core.pace import Pace
from thinwire.core.rounds import InFlight
from thinwire.core.slots import overwrite
from thinwire.errors import CheckpointError, ConfigError, check_choice, check_whole_number
from thinwire.links.base import Link
from thinwire.maths.update_rules import check_eps
from thinwire.payload import zero_invalid_
from thinwire.schedules import Every, Schedule, Staggered, as_schedule
from thinwire.sharding.shards import local

log = logging.getLogger("thinwire")


class Wrapper(Algorithm):
    """Base of the methods around an inner optimizer: any `torch.optim.Optimizer`, which keeps its own state.

    The parameter groups are the inner optimizer's own, so an LR scheduler on the wrapper drives the inner optimizer. The two
    state dicts stay apart (a shared one would break Adam's lazy initialisation) and are merged in `state_dict()`, where the
    inner optimizer's keys have the prefix "inner.".

    Args:
        inner: the optimizer that takes the local steps.
        link: this worker's end of the wire.
        H: exchange every H steps, or a `Schedule`.
        tau: steps between sending and applying a round, below H; then the slot "outgoing" keeps what was sent last.
        codec: what is sent.
        slots: see `Algorithm`.
        settings: see `Algorithm`.
        pace: "equal" steps on all workers, or as many as each one's measured "speed" allows; see `thinwire.core.pace`.
        offload: "host" keeps `rests_on_host` in the host's memory between rounds; see `thinwire.core.offload`.
        options: see `Policy`.
    """

    usual_inner: ClassVar[str] = "adamw"  # of runs that name no inner optimizer
    sends_as_they_are: ClassVar[bool] = False  # whether messages hold parameters or gradients themselves, and nothing else
    rests_on_host: ClassVar[tuple[str, ...]] = ("anchor", "momentum", "velocity")  # slots that offload="host" is about

    def __init__(
        self,
        inner: Optimizer,
        link: Link,
        *,
        H: int | Schedule = 1,
        tau: int = 0,
        codec: Codec | CodecSchedule | None = None,
        slots: Mapping[str, Start] | None = None,
        settings: Mapping[str, object] | None = None,
        pace: Literal["equal", "speed"] = "equal",
        offload: Place = "none",
        **options: Unpack[PolicyOptions],
    ):
        """Take over the inner optimizer's parameter groups."""
        check_choice("pace", pace, ("equal", "speed"))
        if pace == "speed" and not isinstance(as_schedule(H), Every):
            raise ConfigError(f"pace='speed' needs a plain number of steps per round, got H={H!r}")
        rounds = () if codec is None else CodecSchedule.of(codec).codecs
        if pace == "speed" and any(one.linear and one.nbytes([torch.empty(1)]) < 4 for one in rounds):
            raise ConfigError(f"pace='speed' weighs contributions on the wire, where {codec!r} would round weights: use fp32")
        check_whole_number("tau", tau, least=0)
        if tau:
            slots = {**(slots or {}), "outgoing": "zeros"}
            self._check_tau(tau, as_schedule(H), pace)
        if not isinstance(inner, Optimizer):
            raise ConfigError(f"the inner optimizer must be a torch.optim.Optimizer, got {type(inner).__name__}")
        codec = self._exact_codec(inner, link) if codec is None else codec
        if isinstance(inner, torch.optim.LBFGS):
            raise ConfigError("LBFGS evaluates its closure several times a step and cannot be an inner optimizer")
        if isinstance(inner, Algorithm) or hasattr(inner, "link"):
            raise ConfigError(f"{type(inner).__name__} cannot be the inner optimizer of {type(self).__name__}: it uses a link")
        self.offload = Offload.of(offload, self.rests_on_host)
        self._wrapping = True
        settings = {"inner": type(inner).__name__, **(settings or {})}
        self.inner = inner
        super().__init__(inner.param_groups, link, H=H, tau=tau, codec=codec, slots=slots, settings=settings, **options)
        if self.offload is not None:
            self.offload.check(self.params(), link)
        self.defaults = {**inner.defaults, **self.defaults}
        self.param_groups = inner.param_groups  # one list, so that whoever sets an lr sets it for both
        self._wrapping = False
        if pace == "speed":
            assert isinstance(self.schedule, Every)
            if self.site is not None:
                raise ConfigError(
                    "pace='speed' lets workers take different numbers of steps, but the members of a site take them together"
                )
            self.pace, self.engine.deferred = Pace(self.link, self.schedule.H), None  # a step counts, or not, at once
            self.own_state[self._active[0]]["pace"] = self.pace.state

    @property
    def state(self) -> MergedState:
        """The slots of every parameter, and the inner optimizer's state of it with the prefix "inner."."""
        self.wait_for_host()
        return MergedState(self._own_state, self.inner, self._inner_entries)

    @state.setter
    def state(self, own: dict[Tensor, dict[str, Any]]) -> None:  # type: ignore[override]
        self._own_state = own  # torch's constructor gives an empty one

    @property
    def own_state(self) -> dict[Tensor, dict[str, Any]]:
        """The slots by parameter."""
        return self._own_state

    def _inner_entries(self, p: Tensor) -> dict[str, Any]:
        """The inner optimizer's state of a parameter, as `state` and `state_dict()` show it.

        Before its first step they are zeros: checkpoint readers fill in what is there already. "inner_ready" says whether the
        inner optimizer has made them itself; what it has not is dropped on loading.
        """
        made = self.inner.state.get(p) or {}
        named = {f"{PREFIX}{key}": value for key, value in (made or _placeholders(self.inner, p)).items()}
        return {READY: torch.tensor(float(bool(made)), device="cpu"), **named}

    @classmethod
    def _exact_codec(cls, inner: Optimizer, link: Link) -> Codec | None:
        """The codec of parameters of 16 bits that are sent as they are, where nothing is added up on the way; else None."""
        return narrow_dense(inner) if cls.sends_as_they_are and link.elastic is not None else None

    def work(self) -> float | None:
        """What this worker's contribution weighs in the next round: its local steps, where workers take different numbers."""
        # Next to nothing rather than nothing: after a restore all workers may have no work to show.
        return None if self.pace is None else max(1e-6, float(self.pace.work))

    @staticmethod
    def _check_tau(tau: int, schedule: Schedule, pace: str) -> None:
        if not isinstance(schedule, Every | Staggered):
            raise ConfigError(f"tau={tau} needs a plain number of steps per round, got H={schedule!r}")
        if pace == "speed":
            raise ConfigError(f"pace='speed' needs tau=0, since workers meet at rounds only, got tau={tau}")
        if tau >= schedule.H:
            raise ConfigError(
                f"tau must be below H={schedule.H}, so that a round is applied before the next message is made, got {tau!r}"
            )

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step: local work, and a round of exchange when one is due."""
        loss = super().step(closure)
        if self.pace is not None:
            self.pace.restart_clock()
        return loss

    def remember(self, outgoing: Outgoing) -> None:
        """With tau > 0, keep what is sent in the slot "outgoing", as `send_again` reads it."""
        if not self.engine.tau:
            return
        sent = outgoing.tensors if outgoing.source is None else outgoing.source
        overwrite(self.part("outgoing", self.which(self.due)), sent)

    def differences(self, which: Sequence[int]) -> list[Tensor]:
        """D_i <- a - x_i of the parameters with these numbers: how far this worker went.

        Without what it has sent in rounds that it could not read yet: those are applied later, and would count twice.
        """
        D = {i: a - x for i, a, x in zip(which, self.part("anchor", which), self.part("param", which), strict=True)}
        for flight, exchange in self.unread_rounds():
            for i, sent in zip(flight.which, exchange.outgoing.source or (), strict=True):
                if i in D and flight.in_params:
                    D[i].sub_(sent)
        return list(D.values())

    def with_feedback(self, D: list[Tensor], which: Sequence[int], slot: str, decay: float) -> list[Tensor]:
        """What is sent with error feedback: decay * slot + D, with the slot as rounds that are not read yet will leave it."""
        kept = dict(zip(which, self.part(slot, which), strict=True))
        for flight, exchange in self.unread_rounds():
            for i, fed, sent in zip(flight.which, exchange.outgoing.tensors, exchange.sent, strict=True):
                kept[i] = fed - sent
        return list(torch._foreach_add(torch._foreach_mul([kept[i] for i in which], decay), D))

    def unread_rounds(self) -> list[tuple[InFlight, Exchange]]:
        """Rounds with a message of this worker that it could not read yet, oldest first."""
        kept_back = self.engine.resend.kept_back if self.engine.tau else ()
        return [(f, f.exchange) for f, got in kept_back if f.exchange and (got is None or got.included)]

    def move_to_anchor(self, arrived: Arrived, *, before: Sequence[Tensor]) -> None:
        """Give the parameters the values of the anchor: x_i <- a'.

        Where this worker's own message was not counted it keeps its progress: x_i <- a' + (x_i - a).

        Args:
            arrived: the round.
            before: copies of the anchor before the round, needed only where this worker was not counted.
        """
        x, a = self.part("param", arrived.which), self.part("anchor", arrived.which)
        if arrived.included:
            overwrite(x, a)
            return
        for x_, a_, b in zip(x, a, before, strict=True):
            x_.copy_(a_ + (x_ - b))

    @staticmethod
    def share_of(D: list[Tensor], arrived: Arrived) -> list[Tensor]:
        """A mean of differences, without the part of those who carry theirs, which would count again when it comes."""
        return D if arrived.share == 1 else list(torch._foreach_mul(D, arrived.share))

    def anchor_before(self, arrived: Arrived) -> list[Tensor]:
        """What `move_to_anchor` needs of the anchor, taken before it changes."""
        return [] if arrived.included else [a.clone() for a in self.part("anchor", arrived.which)]

    def local_step(self) -> None:
        """One step of the inner optimizer; skipped when this worker's gradient is not finite."""
        if self.engine.deferred is not None:
            self.engine.deferred.local_step(self)
            return
        if self.gradients_finite():
            self.prepare_gradients()
            self.inner.step()
            if self.pace is not None:
                self.pace.worked()
            return
        log.warning("rank %d, step %d: NaN or Inf in the gradient, local step skipped", self.peers.id, self.steps)
        if self.pace is not None:
            self.pace.skipped()
        # To raise here would leave the others waiting for this worker: all raise together in the next round.
        self.engine.invalid_next = self.policy.on_nonfinite == "raise"

    def prepare_gradients(self) -> None:
        """What a method does to finite gradients before the inner optimizer sees them; nothing for most."""

    def restore(self) -> None:
        """Back to the last agreed parameters; whatever is invalid in this worker's own state becomes zero."""
        super().restore()
        if "anchor" in self._slots:
            if self.pace is not None:
                self.pace.committed()  # the steps since then are undone
            overwrite(self.params(), self.slot("anchor"))
            for tensors in self.inner_state().values():
                zero_invalid_(tensors)

    def agreed(self) -> list[Tensor] | None:
        """The anchor, where there is one."""
        return self.slot("anchor") if "anchor" in self._slots else None

    def inner_state(self) -> dict[str, list[Tensor]]:
        """The inner optimizer's tensors that have their parameter's shape, by key (exp_avg, momentum_buffer, ...)."""
        found: dict[str, list[Tensor]] = {}
        for p in self._active:
            for key, value in self.inner.state.get(p, {}).items():
                if _is_moment(key, value, p):
                    found.setdefault(key, []).append(local(value))
        return found

    def make_inner_state(self, *, known: Sequence[str] | None = None) -> None:
        """Make the inner optimizer's state where it is not there yet, as if it had begun at zero.

        A worker that has skipped a step, or has had no gradient for some parameter, has no state for it; one that averages
        moments needs them all.

        Args:
            known: the states that there may be; any where it is not given.
        """
        for p in self._active:
            if not self.inner.state.get(p):
                made = _placeholders(self.inner, p)
                odd = [k for k, v in made.items() if isinstance(v, Tensor) and v.shape != p.shape and not k.startswith("step")]
                if odd:
                    raise ConfigError(f"{type(self.inner).__name__} keeps {odd[0]!r}, which does not begin at zero")
                self.inner.state[p] = made
        if strange := sorted(set(self.inner_state()) - set(known)) if known is not None else []:
            raise ConfigError(
                f"{type(self.inner).__name__} keeps {strange[0]!r} of the parameters added, and {type(self).__name__} knows of "
                f"{', '.join(known or [])} only: give all parameters to the constructor"
            )

    # --- Parameter groups and state dicts ------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the inner optimizer and make their slots."""
        if self._wrapping:
            super().add_param_group(param_group)
            return
        with self._all_or_nothing():
            self.inner.add_param_group(param_group)  # appends to the list that both share
            self._adopt(self.param_groups[-1])

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        inner = {} if self._wrapping else {p: dict(entries) for p, entries in self.inner.state.items()}
        try:
            with super()._all_or_nothing():
                yield
        except BaseException:
            if not self._wrapping:
                self.inner.state.clear()
                self.inner.state.update(inner)
            raise

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Refuse an eps that is 0 in the dtype of what the inner optimizer adds it to, as that of AdamW is in float16."""
        super()._check_group(group)
        eps = group.get("eps")
        if not isinstance(eps, float):
            return
        one_each = {p.dtype: p for p in group["params"] if p.requires_grad and p.dtype.itemsize < 4}
        for p in one_each.values():
            kept = self.inner.state.get(p) or _placeholders(self.inner, p)
            dtypes = {value.dtype for key, value in kept.items() if _is_moment(key, value, p)}
            check_eps(eps, dtypes, type(self.inner).__name__)

    def state_dict(self) -> dict[str, Any]:
        """One dict with the state of both; the inner optimizer's keys have the prefix "inner."."""
        merged = super().state_dict()
        merged["state"] = {index: dict(entries) for index, entries in merged["state"].items()}
        return merged

    def _checked(self, state_dict: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
        state, steps = super()._checked(state_dict), state_dict["param_groups"][0]["thinwire_step"]
        for index, _ in self._indexed():
            there = [key for key in state[index] if key.startswith(PREFIX)]
            if steps > 0 and (READY not in state[index] or (bool(state[index][READY]) and not there)):
                raise CheckpointError(
                    f"the state is of step {steps}, but what {type(self.inner).__name__} keeps of tensor {index} is not in it "
                    f"({READY!r} and '{PREFIX}*'): the loader has dropped it, as those do that take only some names. Load all "
                    "that state_dict() gave, or use thinwire.checkpoint"
                )
        return state

    def _load_groups(self, state: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Load the inner optimizer, whose groups these are."""
        inner = {}
        for index, entries in state.items():
            if bool(entries.get(READY, False)):
                inner[index] = {k.removeprefix(PREFIX): v for k, v in entries.items() if k.startswith(PREFIX)}
        numbers = iter(range(len(state)))
        numbered = [{**g, "params": [next(numbers) for _ in g["params"]]} for g in groups]
        self.inner.load_state_dict({"state": inner, "param_groups": numbered})
        self.param_groups = self.inner.param_groups  # loading has replaced the list


def narrow_dense(inner: Optimizer) -> Dense | None:
    """The dense codec that holds all parameters and gradients exactly in 16 bits; None where it takes 32."""
    trained = [p for group in inner.param_groups for p in group["params"] if p.requires_grad]
    dtypes = {p.dtype for p in trained} | {getattr(p, "grad_dtype", None) or p.dtype for p in trained}
    return Dense(*dtypes) if dtypes in ({torch.bfloat16}, {torch.float16}) else None


def inner_keys(inner: Optimizer) -> list[str]:
    """Names of the states that an optimizer keeps in its parameters' shape, sorted; known before its first step too."""
    if not isinstance(inner, Optimizer):
        raise ConfigError(f"the inner optimizer must be a torch.optim.Optimizer, got {type(inner).__name__}")
    found = set()
    for p in (p for group in inner.param_groups for p in group["params"] if p.requires_grad):
        entries = inner.state.get(p) or _placeholders(inner, p)
        found |= {k for k, v in entries.items() if _is_moment(k, v, p)}
    return sorted(found, key=lambda key: (len(key), key))  # exp_avg_2 before exp_avg_10


def _is_moment(key: str, value: object, p: Tensor) -> bool:
    """Whether an inner optimizer's state has its parameter's shape, and is not a count of steps of a 0-d one."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == p.shape and not key.startswith("step")


# What `_placeholders` found on meta tensors, by optimizer, settings and shape: a step without values takes milliseconds too.
_FOUND_ON_META: WeakKeyDictionary[Optimizer, dict[object, dict[str, Any]]] = WeakKeyDictionary()


def _placeholders(inner: Optimizer, p: Tensor) -> dict[str, Any]:
    """The state that `inner` would make for `p` at its first step, zeroed; found by stepping a twin on a tensor of zeros."""
    group = next(g for g in inner.param_groups if any(q is p for q in g["params"]))
    if not p.is_meta:
        return {k: torch.zeros_like(v) if isinstance(v, Tensor) else v for k, v in _first_state(inner, group, p).items()}
    settings = repr([(name, value) for name, value in group.items() if name != "params"])
    found, key = _FOUND_ON_META.setdefault(inner, {}), (settings, p.shape, p.dtype)
    if key not in found:
        found[key] = _first_state(inner, group, p)
    empty = {k: torch.empty(v.shape, dtype=v.dtype, device=v.device) for k, v in found[key].items() if isinstance(v, Tensor)}
    return found[key] | empty


def _first_state(inner: Optimizer, group: Mapping[str, Any], p: Tensor) -> dict[str, Any]:
    stand_in = torch.nn.Parameter(torch.zeros_like(p.detach()))
    stand_in.grad = torch.zeros_like(stand_in)
    twin = object.__new__(type(inner))
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # the user's: this is no step of theirs
    twin.__dict__.update({k: type(v)() if k in hooks else v for k, v in inner.__dict__.items() if k != "step"})
    twin.state = type(inner.state)(dict)
    twin.param_groups = [{**group, "params": [stand_in]}]
    if isinstance(lr := group.get("lr"), float) and lr > 1:  # of a wrong one, such as 1e38, the step would overflow
        twin.param_groups[0]["lr"] = 1.0
    twin.step()
    return dict(twin.state.get(stand_in, {}))
