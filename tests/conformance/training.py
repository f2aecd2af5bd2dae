"""What the conformance tests train: an ordinary loop on a small model with awkward shapes, for any algorithm class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from thinwire import DCT, Codec, Dense, Float, Sign, TopK, parse_codec
from thinwire.algorithms import DeMo, found
from thinwire.core.optimizer import Algorithm
from thinwire.core.wrapper import Wrapper
from thinwire.links.base import Link
from thinwire.sharding.shards import local
from thinwire.tools.config import presets

# Every class by its name, and every preset that fixes some of a class's settings.
FIXED: dict[str, dict[str, Any]] = {name: fixed for name, (_, fixed) in presets().items() if fixed}
ALGORITHMS = found() | {name: found()[presets()[name][0]] for name in FIXED}
# Methods whose messages owners average.
OWNED: dict[str, str] = {"demo": "DCT(4) >> TopK(2) >> Sign()", "decoupled-diloco": "DCT(4) >> TopK(2) >> Sign()"}
OWNED |= {"diloco": "ternary", "streaming-diloco": "ternary", "mt-dao": "fp4"}
FIXED |= {f"{name}-by-owners": {"wire": wire, "route": "owners"} for name, wire in OWNED.items()}
ALGORITHMS |= {f"{name}-by-owners": found()[name] for name in OWNED}
# Signs of a part of the entries in turn, of a momentum that keeps what was sent.
FIXED["demo-in-turn-by-owners"] = {"wire": "DCT(4) >> Striding(0.5) >> Sign()", "route": "owners", "alpha": 0.0, "beta": 0.9}
ALGORITHMS["demo-in-turn-by-owners"] = found()["demo"]
# LoRDO with projectors that are taken from what its messages hold besides.
SOURCES: dict[str, dict[str, Any]] = {
    "lordo-gradient": {"source": "gradient", "lives": 4.0},
    "lordo-sketch": {"source": "sketch", "average_feedback": True, "from_start": "v"},
}
FIXED |= SOURCES
ALGORITHMS |= {name: found()["lordo"] for name in SOURCES}
NAMES = list(ALGORITHMS)


def named(chosen: Callable[[str], bool] = lambda _: True) -> list[Any]:
    """Those of `NAMES` that are chosen, for `parametrize`. All but the classes are slow: a quick test has each class."""
    return [name if name in found() else pytest.param(name, marks=pytest.mark.slow) for name in NAMES if chosen(name)]


H = 4  # every method with a period gets this one


class Awkward(nn.Module):
    """0-d, 1-d, odd and prime shapes, one frozen parameter and one that gets no gradient at odd steps."""

    def __init__(self, width: int = 7):
        super().__init__()
        self.first = nn.Linear(5, width)
        self.second = nn.Linear(width, 3, bias=False)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.sometimes = nn.Parameter(torch.full((2, 1), 0.1))

    def forward(self, x: Tensor, step: int) -> Tensor:
        y = self.second(torch.tanh(self.first(x))) * self.gain + self.frozen
        return y + self.sometimes.sum() if step % 2 == 0 else y


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def qhadam(params: Any) -> torch.optim.Optimizer:
    return thinwire.optim.QHAdam(params, lr=0.01, betas=(0.9, 0.99), omegas=(0.2, 0.6), weight_decay=0.1)


def build(
    name: str,
    params: Any,
    link: Link,
    *,
    inner: Callable[[Any], torch.optim.Optimizer] | None = None,
    **settings: Any,
) -> Algorithm:
    """An instance of the algorithm with this name and its usual inner optimizer, with a short period if it has one."""
    cls = ALGORITHMS[name]
    fixed = dict(FIXED.get(name, {}))
    usual = fixed.pop("inner", cls.usual_inner if issubclass(cls, Wrapper) else "")
    inner = inner or {"qhadam": qhadam}.get(usual, adamw)
    if "wire" in fixed:
        fixed["codec"] = parse_codec(fixed.pop("wire"))
    if "H" in inspect.signature(cls.__init__).parameters:
        fixed["H"] = H
    fixed |= {name: H for name in ("K_u", "K_v") if name in fixed}
    settings = {**fixed, **settings}
    if issubclass(cls, Wrapper):
        return cls(inner(params), link, **settings)  # type: ignore[call-arg]
    return cls(params, link, **settings)


def smooth(name: str) -> dict[str, Any]:
    """Settings under which a rounding error stays one: a sign would turn it into a whole step."""
    return {"phi": "sgd", "lr": 0.02} if issubclass(ALGORITHMS[name], DeMo) else {}


def codec_of(name: str, gather: bool) -> Codec:
    """What travels by a gather or by a mean on the wire; methods with coded state take chains only."""
    if issubclass(ALGORITHMS[name], DeMo):
        return DCT(4) >> TopK(5) >> Sign() if gather else Float("fp32")
    return Dense(gather=gather)


def model_of(seed: int = 0, dtype: torch.dtype = torch.float32) -> Awkward:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Awkward().to(dtype)


def batch_of(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The batch is a pure function of worker and step."""
    g = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(6, 5, generator=g)
    return x.to(dtype), torch.stack([x.sum(1), x.prod(1), x[:, 0]], 1).to(dtype)


def backward(model: nn.Module, rank: int, step: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    x, y = batch_of(rank, step, dtype)
    loss = (model(x, step) - y).square().mean()
    loss.backward()
    return loss.detach()


def train(model: nn.Module, opt: Algorithm, rank: int, steps: int, *, first: int = 1) -> None:
    for step in range(first, first + steps):
        backward(model, rank, step)
        opt.step()
        opt.zero_grad()


def snapshot(model: nn.Module) -> list[Tensor]:
    return [local(p.detach()).clone() for p in model.parameters()]


def shared(opt: Algorithm) -> dict[str, list[Tensor]]:
    return {name: [t.clone() for t in tensors] for name, tensors in opt.shared_state().items()}


def assert_same(a: list[Tensor], b: list[Tensor], message: str = "") -> None:
    assert len(a) == len(b), message
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        assert torch.equal(x, y), f"{message} tensor {i} differs by {(x - y).abs().max().item():.3g}"


def assert_close(a: list[Tensor], b: list[Tensor], tolerance: float = 1e-6) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)
