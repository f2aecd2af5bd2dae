"""Slots: the state that an optimizer keeps for each parameter, made at once, and checked as a whole when it is loaded."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.codecs import Chain, Codec, CodecSchedule
from thinwire.codecs.schedule import parse_wire
from thinwire.core.offload import Offloading
from thinwire.errors import CheckpointError, ConfigError
from thinwire.payload import LARGEST, all_finite
from thinwire.sharding.shards import Shards, local, reshard

log = logging.getLogger("thinwire")

# What a state slot begins as: zeros like the parameter, in float32 or wider or in bfloat16, a copy of it, zeros in the domain
# of the codec's transform, of all blocks or of those that this worker owns, one zero, or what a function makes of the parameter
# (None: it has no such slot).
Start = Literal["zeros", "bf16 zeros", "param", "coded", "owed", "count"] | Callable[[Tensor], Tensor | None]

COUNTERS = ("thinwire_step", "thinwire_round", "thinwire_synced")
WHOSE = ("thinwire_worker", "thinwire_workers")  # of a state dict: the id of its worker, and how many there were
CODED_BY = "_coded_by"  # of a state dict: the codec in whose domain some of its slots are, in words


class SlotOptimizer(Offloading, Optimizer):
    """A torch optimizer whose state is made at once, named, and checked when it is loaded.

    Two kinds of state. Keys in `replicated` are bit-equal on all workers at any time; all other state, such as the moments of
    an inner Adam, is each worker's own. Keys in `synced` (most often the parameters) are bit-equal right after a round. That
    declaration drives the conformance tests, the checkpoint's layout, joining, abort safety and the divergence alarm. The
    word "param" stands for the parameters, and "inner" for the inner optimizer's state.
    """

    name: ClassVar[str] = ""
    replicated: frozenset[str] = frozenset()
    synced: frozenset[str] = frozenset()

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        codec: Codec | CodecSchedule,
        slots: Mapping[str, Start],
        settings: Mapping[str, object],
    ):
        """Make every slot."""
        self.codecs, self.settings = CodecSchedule.of(codec), dict(settings)
        self._slots = dict(slots)
        self._active: list[Tensor] = []
        self._frozen: list[Tensor] = []
        self.handshake_done = False
        super().__init__(params, {**defaults, **dict.fromkeys(COUNTERS, 0)})
        if not self._active:
            raise ConfigError(f"{type(self).__name__} has nothing to train: no parameter requires a gradient")
        self.shards = Shards(self._active)

    @property
    def own_state(self) -> dict[Tensor, dict[str, Any]]:
        """The slots by parameter: `state` without what an inner optimizer keeps."""
        return self.state

    # --- The state, as lists of local tensors ------------------------------------------------------------------------

    def params(self) -> list[Tensor]:
        """This process's part of every parameter that takes part."""
        return [local(p.detach()) for p in self._active]

    def slot(self, name: str) -> list[Tensor]:
        """This process's part of the state slot `name`, in the order of `params()`; of those parameters that have it."""
        self.wait_for_host()
        return [local(self.own_state[p][name]) for p in self._active if name in self.own_state[p]]

    def part(self, name: str, which: Sequence[int]) -> list[Tensor]:
        """The slot `name`, or "param", of the parameters with these numbers; empty where no parameter has that slot."""
        everything = self.params() if name == "param" else self.slot(name)
        return [everything[i] for i in which] if everything else []

    def gradients(self) -> list[Tensor]:
        """This process's part of every gradient, in the order of `params()`; zeros where a parameter has none."""
        return [torch.zeros_like(local(p.detach())) if p.grad is None else local(p.grad) for p in self._active]

    def groups(self) -> list[dict[str, Any]]:
        """The parameter group of each of `params()`: where its lr and other settings are."""
        found = {p: group for group in self.param_groups for p in group["params"]}
        return [found[p] for p in self._active]

    def inner_state(self) -> dict[str, list[Tensor]]:
        """The inner optimizer's floating state by key; empty without an inner optimizer."""
        return {}

    def shared_state(self) -> dict[str, list[Tensor]]:
        """Everything that is bit-equal on all workers right after a round, by name."""
        parts: dict[str, list[Tensor]] = {}
        for key in sorted(self.replicated | self.synced):
            if key == "param":
                parts[key] = self.params()
            elif key == "inner":
                parts.update({f"inner.{k}": v for k, v in self.inner_state().items()})
            elif values := self.slot(key):
                parts[key] = values
        return parts

    def replicated_state(self) -> dict[str, list[Tensor]]:
        """Of `shared_state()` what is bit-equal at any time."""
        return {name: t for name, t in self.shared_state().items() if name.partition(".")[0] in self.replicated}

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        return self.param_groups[0]["thinwire_step"]

    @property
    def rounds(self) -> int:
        """Rounds so far, aborted ones too; without those in flight."""
        return self.param_groups[0]["thinwire_round"]

    @property
    def pending_steps(self) -> int:
        """Local steps since the last committed round."""
        return self.steps - self.param_groups[0]["thinwire_synced"]

    def set_counter(self, name: str, value: int | str | list[int]) -> None:
        """Set what all workers have in common; it is kept in the parameter groups, and so in checkpoints."""
        for group in self.param_groups:
            group[name] = value

    # --- Whether numbers are valid ---------------------------------------------------------------------------------------

    def gradients_finite(self) -> bool:
        """Whether this worker's gradients are finite and not too large, on all of its shards."""
        grads = [local(p.grad) for p in self._active if p.grad is not None]
        return not self.shards.any(not all_finite(grads, LARGEST))

    def params_finite(self) -> bool:
        """Whether this worker's parameters are finite, on all of its shards."""
        return not self.shards.any(not all_finite(self.params()))

    def clip_factor(self, max_norm: float) -> float | Tensor:
        """What to multiply this worker's gradient by, so that its norm over all shards is at most `max_norm` (0: no limit).

        The same as `torch.nn.utils.clip_grad_norm_` does. Off the CPU it is a 0-d tensor, which nobody has looked at.
        """
        if not max_norm:
            return 1.0
        grads = [local(p.grad) for p in self._active if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        if norm.device.type != "cpu":
            norm = self.shards.totals_on_device(norm.square()).sqrt() if self.shards.several else norm
            return (max_norm / (norm + 1e-6)).clamp(max=1.0)
        (square,) = self.shards.totals([float(norm) ** 2])
        return min(1.0, max_norm / (math.sqrt(square) + 1e-6))

    # --- Parameter groups ------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as in any torch optimizer; on all workers alike. One that is refused leaves nothing behind."""
        with self._all_or_nothing():
            super().add_param_group(param_group)
            self._adopt(self.param_groups[-1])

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Take back what was added to groups, parameters and state within it, where that raises."""
        groups, active, frozen = len(self.param_groups), len(self._active), len(self._frozen)
        state, done = {p: dict(entries) for p, entries in self.own_state.items()}, self.handshake_done
        try:
            yield
        except BaseException:
            del self.param_groups[groups:], self._active[active:], self._frozen[frozen:]
            self.own_state.clear()
            self.own_state.update(state)
            self.handshake_done = done
            raise

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Raise a `ConfigError` for a parameter group that this method cannot train; nothing has been made of it yet."""
        for p in group["params"]:
            if p.requires_grad and not p.is_floating_point():
                raise ConfigError(f"parameters must be real floating-point tensors, got {p.dtype} of shape {tuple(p.shape)}")

    def _adopt(self, group: dict[str, Any]) -> None:
        """Make the state slots of a new group."""
        for name in (*COUNTERS, *WHOSE):
            group[name] = self.param_groups[0].get(name, 0)
        self._check_group(group)
        for p in group["params"]:
            if not p.requires_grad:
                self._frozen.append(p)
                continue
            self._active.append(p)
            # An entry even without slots: with an empty state torch's checkpointing would take a step "to initialise" it.
            state = self.own_state[p]
            wide = torch.promote_types(p.dtype, torch.float32)  # a decay of 0.999 would be lost in bf16
            for name, start in self._slots.items():
                if callable(start):
                    if (made := start(p.detach())) is not None:
                        state[name] = made
                elif start == "count" and self.wants(name, group):
                    state[name] = torch.tensor(0.0, device="cpu")  # whatever the default device
                elif start not in ("coded", "owed") and self.wants(name, group):
                    kept = torch.bfloat16 if start == "bf16 zeros" else wide
                    state[name] = p.detach().to(wide, copy=True) if start == "param" else torch.zeros_like(p, dtype=kept)
            if self.offload is not None:
                self.offload.rest(p, state)
        self._make_coded()
        self.handshake_done = False

    def wants(self, slot: str, group: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """Whether the parameters of a group have this slot; all of them, unless a method says otherwise."""
        return True

    def _make_coded(self) -> None:
        """Make the slots whose shape is the codec's affair: it depends on all tensors of a message."""
        names = coded_slots(self)
        if not names or not self._active:
            return
        self.codecs.check_slots()
        shapes = Chain.of(self.codecs.codecs[0]).slot_shapes(self.params())
        for p, shape in zip(self._active, shapes, strict=True):
            for name in names:
                before = self.own_state[p].get(name)
                if before is None or before.shape != torch.Size(shape):
                    if before is not None and bool(before.any()):
                        log.warning("with the parameters added, tensors of a message lie otherwise: a %s is reset", name)
                    self.own_state[p][name] = torch.zeros(shape, device=local(p).device)

    # --- State dicts -----------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state that `state_dict()` gave; checked as a whole before anything changes."""
        self.wait_for_host()
        state = self._checked(state_dict)
        self._load_groups(state, state_dict["param_groups"])
        self._load_slots(state)
        self.handshake_done = False  # all workers must have loaded the same step

    def _checked(self, state_dict: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
        """The state by parameter number, once it is known to fit.

        As in torch, parameters are matched by their place in the groups: stock checkpointing uses names as their keys.
        """
        groups = state_dict["param_groups"]
        mine, theirs = [len(g["params"]) for g in self.param_groups], [len(g["params"]) for g in groups]
        if mine != theirs:
            raise CheckpointError(f"state has parameter groups of {theirs} tensors, this optimizer has {mine}")
        missing = [k for k in COUNTERS if k not in groups[0]]
        if missing:
            raise CheckpointError(f"not a state of thinwire's {type(self).__name__}: {missing[0]} is missing")
        for name in (*COUNTERS, "in_flight"):
            value = groups[0].get(name, 0)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise CheckpointError(f"{name} must be a whole number of at least 0, got {value!r}")
        keys = [key for group in groups for key in group["params"]]
        state = {index: state_dict["state"].get(key, {}) for index, key in enumerate(keys)}
        for index, p in self._indexed():
            for name, mine in self.own_state[p].items():
                if name not in state[index]:
                    raise CheckpointError(f"state of tensor {index} has no {name!r}, only {sorted(state[index])}")
                if state[index][name].shape != mine.shape:
                    shapes = f"{tuple(state[index][name].shape)}, here it has {tuple(mine.shape)}"
                    raise CheckpointError(f"{name!r} of tensor {index} has shape {shapes}")
        if note := other_codec(self, groups[0]):
            log.warning("%s", note)
        return state

    def _load_groups(self, state: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:  # noqa: ARG002
        for mine, theirs in zip(self.param_groups, groups, strict=True):
            mine.update({k: v for k, v in theirs.items() if k != "params"})

    def _load_slots(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        with torch.no_grad():
            for index, p in self._indexed():
                for name, mine in self.own_state[p].items():
                    mine.copy_(state[index][name])

    def _indexed(self) -> list[tuple[int, Tensor]]:
        """Every parameter that takes part, with its number in `state_dict()`."""
        everyone = [p for group in self.param_groups for p in group["params"]]
        active = {id(p) for p in self._active}
        return [(i, p) for i, p in enumerate(everyone) if id(p) in active]

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copy and pickle: a link cannot be copied along."""
        raise TypeError(
            f"{type(self).__name__} holds a link and cannot be copied or pickled: use state_dict() and a new object"
        )

    def __repr__(self) -> str:
        """The method and its settings, on one line."""
        settings = ", ".join(f"{k}={v!r}" for k, v in self.settings.items())
        return f"{type(self).__name__}({settings})"


def coded_slots(optimizer: SlotOptimizer) -> list[str]:
    """Names of the slots that are in the domain of the codec's transform."""
    return [name for name, start in optimizer._slots.items() if start == "coded"]


def other_codec(optimizer: SlotOptimizer, group: Mapping[str, Any]) -> str:
    """What to say where a state's coded slots were made by another codec than the optimizer's; empty where they were not.

    Args:
        optimizer: that would go on with them.
        group: the first parameter group of the state.

    Raises:
        CheckpointError: they are in the domain of another codec.
    """
    names, here, saved = coded_slots(optimizer), optimizer.codecs, group.get(CODED_BY)  # which may be of a damaged file
    if not names or not optimizer._active or saved == repr(here):
        return ""
    if saved is None:  # from before it was kept
        return f"the state does not tell by which codec its {names[0]} was made; it is taken for that of {here!r}"
    try:
        theirs = CodecSchedule.of(parse_wire(str(saved)))
    except ConfigError:
        theirs = here  # a codec of somebody's own
    if _domain(theirs, optimizer.params()) != _domain(here, optimizer.params()):
        raise CheckpointError(
            f"the {names[0]} of this state was made by {saved}, whose blocks are others than those of {here!r}: "
            "go on with that codec"
        )
    return f"the state was made by {str(saved)[:200]}; from here on the codec is {here!r}"


def _domain(schedule: CodecSchedule, tensors: Sequence[Tensor]) -> tuple[object, object]:
    """What decides what a slot means: the transform, and which tensors are cut into which blocks."""
    chain = Chain.of(schedule.codecs[0])
    return chain.transform, chain.plan(tensors).layout


def clipped(grads: list[Tensor], factor: float | Tensor) -> float:
    """A `clip_factor` for those who need a number; by one that nobody has looked at gradients are multiplied in place."""
    if isinstance(factor, Tensor):
        torch._foreach_mul_(grads, factor)
        return 1.0
    return factor


def overwrite(params: list[Tensor], values: list[Tensor], model: nn.Module | None = None) -> None:
    """Copy `values` into parameters; give the model where FSDP2 shards it."""
    with torch.no_grad():
        for x, value in zip(params, values, strict=True):
            x.copy_(value)
    if model is not None:
        reshard(model)
