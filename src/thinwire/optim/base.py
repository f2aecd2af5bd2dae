"""What the optimizers of this package have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer


class GroupOptimizer(Optimizer):
    """An optimizer that steps group by group, refuses wrong groups as a whole, and keeps the dtype of its state on loading."""

    tuples: ClassVar[tuple[str, ...]] = ("betas",)  # settings that are tuples; a JSON or checkpoint reader makes lists of them

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise a `ConfigError` for a parameter group with wrong settings; may convert settings in place."""
        raise NotImplementedError

    def step_group(self, group: dict[str, Any]) -> None:
        """Take one step of the parameters of a group."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as in any torch optimizer."""
        super().add_param_group(param_group)
        try:
            self.check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.step_group(group)
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As in torch, but the state keeps its dtype: torch casts it to that of the parameters."""
        super().load_state_dict(dict(state_dict))
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for key, p in zip(keys, params, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                where = "cpu" if name.startswith("step") else p.device  # counts stay on the CPU
                self.state[p][name] = torch.as_tensor(value).detach().to(where, copy=True)
        for group in self.param_groups:
            group.update({name: tuple(group[name]) for name in self.tuples})
