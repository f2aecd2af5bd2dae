"""Streaming: the base of methods that send a model in fragments, each of which travels while the next steps are computed.

A fragment is due every H steps, the fragments one after the other. What it sends at step t is applied after step t + tau:

    tau = 0:    step t | send p, wait, apply p | step t+1
    tau = 2:    step t | send p                | step t+1 | step t+2 | apply p        waits only for what is late

What is under way is not part of a checkpoint, but what it was made of is: the slot "outgoing" holds what each parameter has
sent last. After a resume the messages under way are sent once more, with the numbers that they had, so that training goes on
bit for bit. Which they are follows from the schedule, the step and the counter "underway".
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from thinwire.core.exchange import PendingAverage, message_nbytes
from thinwire.core.optimizer import Algorithm
from thinwire.errors import ConfigError, check_choice, check_whole_number
from thinwire.schedules import Staggered

log = logging.getLogger("thinwire")

Layout = Literal["balanced", "strided", "sequential"]


@dataclass
class Sent:
    """A message under way.

    Attributes:
        fragments: what it brings.
        step: after which it was sent.
        which: numbers of the parameters in it: those of a group that was added since are not.
        last: whether it is that of `finish()`, after which all workers shall be equal.
        pending: what to wait for; None after a resume, until it has been sent again.
    """

    fragments: tuple[int, ...]
    step: int
    which: list[int] = field(default_factory=list)
    last: bool = False
    pending: PendingAverage | None = None


class Streaming(Algorithm):
    """Base of methods with a `send` of some parameters and an `update` that applies what `arrived`.

    Args:
        arguments: further ones of `Algorithm` or `Wrapper`.
        H: steps between two rounds of one fragment.
        fragments: how many there are, or which parameters each one has.
        layout: how parameters are dealt to fragments where only their number is given.
        tau: steps between sending and applying.
        base: further settings of `Algorithm` or `Wrapper`.
    """

    sends_fragments = True

    def __init__(
        self,
        *arguments: Any,
        H: int,
        fragments: int | Sequence[Sequence[Parameter]],
        layout: Layout,
        tau: int,
        **base: Any,
    ):
        """Nothing is under way yet."""
        check_choice("layout", layout, get_args(Layout))
        check_whole_number("tau", tau, least=0)
        self._by_hand = None if isinstance(fragments, int) else [list(some) for some in fragments]
        P = len(self._by_hand) if self._by_hand is not None else fragments
        schedule = Staggered(H, P)  # type: ignore[arg-type]
        if tau >= H:
            raise ConfigError(
                f"tau must be below H={H}, so that a fragment is applied before its next message is made, got {tau!r}"
            )
        self.layout: Layout = layout
        self.tau = tau
        self._underway: deque[Sent] = deque()
        self._dealt: list[int] = []
        self.arrived = Sent((), 0)
        super().__init__(*arguments, H=schedule, **base)
        self._set_counter("underway", 0)
        dealt = self.fragment_of()
        self.settings |= {"fragments": P, "layout": layout} if self._by_hand is None else {"fragments": dealt}

    # --- What a method writes --------------------------------------------------------------------------------------------

    def send(self, which: list[int], *, round: int, again: bool) -> PendingAverage:
        """Put the parameters with these numbers on their way; `again` as the slot "outgoing" has them."""
        raise NotImplementedError

    # --- Which parameters a fragment has -------------------------------------------------------------------------------

    def fragment_of(self) -> list[int]:
        """The fragment of each of `params()`. Those of a group that is added later do not move the ones that were there."""
        if len(self._dealt) != len(self._active):
            self._dealt = self._named() if self._by_hand is not None else self._deal()
        return self._dealt

    def _adopt(self, group: dict[str, Any]) -> None:
        super()._adopt(group)
        if self._dealt:  # not while the first groups come in, one by one
            self.fragment_of()  # refuses parameters that no fragment names

    def which(self, fragments: Sequence[int]) -> list[int]:
        """Numbers of the parameters that these fragments have; none where there are fewer parameters than fragments."""
        return [i for i, p in enumerate(self.fragment_of()) if p in fragments]

    def _deal(self) -> list[int]:
        known, P, dealt = {id(p) for p in self._active}, self.schedule.fragments, []
        loads = [0] * P
        for group in self.param_groups:
            sizes = [p.numel() for p in group["params"] if id(p) in known]
            for size, p in zip(sizes, deal(sizes, P, self.layout, loads=loads, first=len(dealt)), strict=True):
                loads[p] += size
                dealt.append(p)
        return dealt

    def _named(self) -> list[int]:
        assert self._by_hand is not None
        named = [(id(x), p) for p, some in enumerate(self._by_hand) for x in some]
        found = dict(named)
        if len(found) != len(named):
            raise ConfigError("a parameter is in two fragments")
        known = {id(x) for x in self._active}
        strangers = [tuple(x.shape) for some in self._by_hand for x in some if id(x) not in known]
        if strangers:
            raise ConfigError(f"fragments name a parameter of shape {strangers[0]} that the optimizer does not train")
        missing = [tuple(x.shape) for x in self._active if id(x) not in found]
        if missing:
            raise ConfigError(f"no fragment names the parameter of shape {missing[0]} ({len(missing)} missing in all)")
        return [found[id(x)] for x in self._active]

    def fragment_nbytes(self) -> list[int]:
        """Length in bytes of one worker's message of each fragment; 0 for one without parameters."""
        parts = [self.which([p]) for p in range(self.schedule.fragments)]
        return [self._nbytes([self.params()[i] for i in part]) if part else 0 for part in parts]

    def _nbytes(self, tensors: list[Tensor]) -> int:
        return message_nbytes(self.link, self.codec, tensors)

    def message_nbytes(self) -> int:
        """Length in bytes of one worker's messages of H steps: those of all fragments."""
        return sum(self.fragment_nbytes())

    # --- The two halves of a round ---------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step: local work, sending what is due, and applying what was sent tau steps ago."""
        loss = super().step(closure)
        with torch.no_grad():
            while self._underway and self._underway[0].step <= self.steps - self.tau:
                self._arrive()
        return loss

    def finish(self) -> None:
        """Apply what is under way, then exchange all fragments once: no worker's last steps are lost, and all end equal."""
        with torch.no_grad():
            while self._underway:
                self._arrive()
            if self.pending_steps > 0:
                self._post(tuple(range(self.schedule.fragments)), last=True)
                self._arrive()
            self.average_buffers()

    def _round(self) -> None:
        """What the schedule calls a round is sent here; the round itself is when it arrives."""
        self._post(self.due)

    def _post(self, fragments: tuple[int, ...], *, last: bool = False) -> None:
        self._send_again()
        if which := self.which(fragments):
            number = self.rounds + len(self._underway) + 1
            pending = self.send(which, round=number, again=False)
            self._underway.append(Sent(fragments, self.steps, which, last, pending))
            self._set_counter("underway", len(self._underway))
            self._withdrawn = False

    def _arrive(self) -> None:
        """The round of the message that was sent first."""
        self._send_again()
        self.arrived = self._underway.popleft()
        self._set_counter("underway", len(self._underway))
        self.due, withdrawn = self.arrived.fragments, self._withdrawn
        try:
            super()._round()
        finally:
            self._withdrawn = withdrawn  # a bad gradient since then is the affair of the next message

    def whole_round(self) -> bool:
        """Whether all workers are equal after this round."""
        return super().whole_round() and self.arrived.last

    def shared_state(self) -> dict[str, list[Tensor]]:
        """Everything that is bit-equal on all workers: after a whole round the parameters too."""
        return super().shared_state() | ({"param": self.params()} if self.pending_steps == 0 else {})

    # --- Resuming ----------------------------------------------------------------------------------------------------------

    def _send_again(self) -> None:
        """Send what was under way when the checkpoint was written."""
        for place, sent in enumerate(self._underway):
            if sent.pending is None:
                sent.pending = self.send(sent.which, round=self.rounds + place + 1, again=True)

    def begin_anew(self) -> None:
        """What was under way was made of state that is no more."""
        self._underway.clear()
        self._set_counter("underway", 0)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As in any algorithm; what was under way is sent again at the next step."""
        super().load_state_dict(state_dict)
        self._underway.clear()
        count = self.param_groups[0]["underway"]
        window = range(max(0, self.steps - self.tau) + 1, self.steps + 1)
        sent = [Sent(due, step, which) for step in window if (which := self.which(due := self.schedule.due(step)))]
        if count > len(sent):  # local values still hold what was sent: the next round carries it along
            log.warning("%d messages were under way with another tau or other fragments: their rounds are left out", count)
            count = 0
        self._underway.extend(sent[len(sent) - count :])
        self._set_counter("underway", count)


def deal(sizes: Sequence[int], P: int, layout: Layout, *, loads: Sequence[int] | None = None, first: int = 0) -> list[int]:
    """The fragment of each tensor.

    Args:
        sizes: number of elements of each.
        P: number of fragments.
        layout: "balanced" puts the largest tensors first, each into the fragment that is smallest by then; "strided" puts
            tensor i into fragment i mod P; "sequential" cuts the list into P runs of about the same size.
        loads: elements that each fragment has already.
        first: tensors that have been dealt already.

    >>> deal([4, 1, 1, 2], 2, "balanced"), deal([4, 1, 1, 2], 2, "strided"), deal([4, 1, 1, 2], 2, "sequential")
    ([0, 1, 1, 1], [0, 1, 0, 1], [0, 1, 1, 1])
    """
    if layout == "strided":
        return [(first + i) % P for i in range(len(sizes))]
    if layout == "sequential":
        ends, total = [sum(sizes[: i + 1]) for i in range(len(sizes))], max(1, sum(sizes))
        return [min(P - 1, P * (2 * end - size) // (2 * total)) for end, size in zip(ends, sizes, strict=True)]
    held, dealt = list(loads or [0] * P), [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        dealt[i] = held.index(min(held))
        held[dealt[i]] += sizes[i]
    return dealt


def block_fragments(model: nn.Module, P: int) -> list[list[Parameter]]:
    """Fragments of transformer blocks, as in the paper: block i goes to fragment i mod P.

    The blocks are the members of the first `nn.ModuleList` or `nn.Sequential` inside the model. All other parameters, such as
    embeddings and heads, go to the fragment that is smallest then.

    Args:
        model: with a list of blocks.
        P: number of fragments, at most that of the blocks.

    Returns:
        What `fragments=` of `StreamingDiLoCo` takes: the parameters of each fragment.
    """
    check_whole_number("P", P)
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and m is not model)
    blocks = next(lists, None)
    if blocks is None:
        raise ConfigError(f"{type(model).__name__} has no list of blocks: give fragments as a number, or make them by hand")
    if len(blocks) < P:
        raise ConfigError(f"P must be at most the number of blocks, {len(blocks)}, got {P}")
    fragments: list[list[Parameter]] = [[] for _ in range(P)]
    taken: set[int] = set()
    for i, block in enumerate(blocks):
        for x in block.parameters():
            if x.requires_grad and id(x) not in taken:
                fragments[i % P].append(x)
                taken.add(id(x))
    smallest = min(fragments, key=lambda some: sum(x.numel() for x in some))
    smallest += [x for x in model.parameters() if x.requires_grad and id(x) not in taken]
    return fragments
