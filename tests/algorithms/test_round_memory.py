"""A round of DeMo and of DecoupledDiLoCo makes no copy of a large tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire import DCT, DecoupledDiLoCo, DeMo, Identity, Sign, SoloLink, TopK
from thinwire.codecs.layout import BATCH

SHAPE = (2048, 1024)  # two batches of a layout


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest memory that an operation makes anew."""

    def __init__(self, known: list[Tensor]):
        super().__init__()
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else [result]:
            if isinstance(t, Tensor) and not t.is_meta and t.untyped_storage().data_ptr() not in self.known:
                self.nbytes = max(self.nbytes, t.untyped_storage().nbytes())
        return result


def largest_of_a_step(make: Callable[[nn.Parameter], torch.optim.Optimizer]) -> int:
    p = nn.Parameter(torch.randn(SHAPE))
    opt = make(p)
    for _ in range(2):
        p.grad = torch.randn(SHAPE)
        known = [p.data, p.grad, *(t for entries in opt.state.values() for t in entries.values() if isinstance(t, Tensor))]
        with Largest(known) as seen:
            opt.step()
    return seen.nbytes


def sgd(p: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD([p], lr=0.1, foreach=False)


ROUNDS: dict[str, Callable[[nn.Parameter], torch.optim.Optimizer]] = {
    "DeMo": lambda p: DeMo([p], SoloLink()),
    "DecoupledDiLoCo": lambda p: DecoupledDiLoCo(sgd(p), SoloLink(), H=1),
    "published": lambda p: DecoupledDiLoCo.published(sgd(p), SoloLink(), H=1),
    "with a momentum": lambda p: DecoupledDiLoCo(sgd(p), SoloLink(), H=1, outer_momentum=0.9),
    "without a transform": lambda p: DecoupledDiLoCo(sgd(p), SoloLink(), H=1, codec=Identity(64) >> TopK(9) >> Sign()),
}


@pytest.mark.parametrize(("name", "kernels"), [*((name, "off") for name in ROUNDS), ("DeMo", "auto"), ("published", "auto")])
def test_a_round_makes_pieces_and_no_copy(name: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_KERNELS", kernels)
    assert largest_of_a_step(ROUNDS[name]) <= 4 * BATCH


def test_a_method_that_makes_one_is_found() -> None:
    codec = DCT(64) >> TopK(9)
    made = largest_of_a_step(lambda p: DecoupledDiLoCo(sgd(p), SoloLink(), H=2, tau=1, codec=codec))
    assert made >= 4 * SHAPE[0] * SHAPE[1]
