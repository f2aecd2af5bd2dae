"""LowRankAdam: Adam with moments of low rank and a full-rank term, on one worker; the baseline of LoRDO.

The step is that of `thinwire.maths.low_rank`. Every H steps the projector is taken from what the parameters have done since the
last time, or from the gradient at hand. Around it, `DataParallel` is low-rank data parallelism: gradients are averaged at every
step, so that Q, the moments and E are the same on all workers. One worker of LoRDO is this optimizer, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import check_whole_number
from thinwire.maths import low_rank
from thinwire.optim.base import GroupOptimizer
from thinwire.sharding.mesh import shard_of


class LowRankAdam(GroupOptimizer):
    """Adam with moments in a subspace of rank r that is chosen again every H steps.

    Example:
        >>> import torch, thinwire
        >>> model = torch.nn.Linear(8, 8)
        >>> inner = thinwire.optim.LowRankAdam(model.parameters(), lr=8e-3, rank=2)
        >>> opt = thinwire.DataParallel(inner, thinwire.connect())

    Args:
        params: parameters or groups; lr, rank, omega, betas, lives, eps and weight_decay may differ per group.
        lr: the step size.
        rank: r, a whole number, or below 1 a part of a matrix's shorter side; see `thinwire.LoRDO`.
        H: steps between two projectors.
        omega: weight of the momentum; the rest is the raw gradient's.
        betas: decay of the two moments.
        eps: added to the root of the second.
        weight_decay: decoupled, times lr.
        qh: the raw gradient enters "outside" of the projection, or "inside".
        feedback: keep what the projection leaves out of a gradient, and add it to the next.
        rotate: turn the moments into the basis of a new projector.
        source: what a projector is taken from: the "difference" since the last one, the "gradient" of the step at hand, or a
            "sketch" of that, as in `thinwire.LoRDO`.
        lives: let the first moment grow slow with the run, as in `thinwire.optim.QHAdam`; 0 has it slow from the start.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        rank: int | float = 0.25,
        H: int = 32,
        omega: float = 0.97,
        betas: tuple[float, float] = (0.999, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        qh: low_rank.QH = "outside",
        feedback: bool = True,
        rotate: bool = True,
        source: low_rank.Source = "difference",
        lives: float = 0.0,
    ):
        """Check the settings; state is made at the first step, as in torch's own."""
        low_rank.check_settings(qh=qh, source=source)
        check_whole_number("H", H)
        self.qh: low_rank.QH = qh
        self.source: low_rank.Source = source
        self.H, self.feedback, self.rotate = H, feedback, rotate
        group = {"lr": lr, "rank": rank, "omega": omega, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, group | {"lives": lives})

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise a `ConfigError` for a parameter group with wrong settings."""
        shared = ("H", "qh", "feedback", "rotate", "source")
        low_rank.check_group(group, settings=shared, sharded=shard_of(group["params"])[1] > 1)

    def step_group(self, group: dict[str, Any]) -> None:
        """Take one step of the parameters of a group, and a new projector where one is due."""
        params = [p for p in group["params"] if p.requires_grad]
        for p in params:
            if not self.state[p]:
                self._make_state(p, group)
            self.state[p]["step"] += 1
        low_rank.step(params, self.state, [group] * len(params), qh=self.qh)
        self._refresh([p for p in params if int(self.state[p]["step"]) % self.H == 0], group)

    def _make_state(self, p: Tensor, group: Mapping[str, Any]) -> None:
        made = {name: make(p.detach()) for name, make in low_rank.slots(lambda: group["rank"], feedback=self.feedback).items()}
        self.state[p].update({name: t for name, t in made.items() if t is not None})
        # Of all parameters, though those without a projector need none: so one worker of LoRDO is the same bits.
        self.state[p]["anchor"] = p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
        self.state[p]["step"] = torch.tensor(0.0)

    def _refresh(self, params: list[Tensor], group: Mapping[str, Any]) -> None:
        anchors = [self.state[p]["anchor"] for p in params]
        D = [p.detach() - a for p, a in zip(params, anchors, strict=True)]
        for p, a, d in zip(params, anchors, D, strict=True):
            p.copy_(a.add_(d))  # rounded as in LoRDO's rounds
        found = {p: self._source_of(p, d) for p, d in zip(params, D, strict=True) if "Q" in self.state[p]}
        low_rank.refresh(found, self.state, [group] * len(found), found.values(), turn=self.rotate)

    def _source_of(self, p: Tensor, difference: Tensor) -> Tensor:
        if self.source == "difference":
            return low_rank.oriented(difference)
        G = p.detach() if p.grad is None else p.grad
        number, clip = int(self.state[p]["step"]) // self.H, float(p.grad is not None)
        return low_rank.contribution(G, self.state[p]["Q"], self.source, round=number, clip=clip)
