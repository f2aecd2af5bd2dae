"""How many files of the library one step crosses: a reader who follows a step has to open each of them.

One worker on `SoloLink`, after the steps that do one-time work (handshake, plans, caches).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import thinwire
from thinwire import DCT, Algorithm, SoloLink, TopK

SOURCE = Path(thinwire.__file__).parent
# What a step may enter: as many as today, so that it becomes no more. The aim is 12 and 9. Three are for the meter that every
# optimizer has around its link (metered, network, stats), and four for the C kernels, tensors that are made while they are
# encoded, and the schedule of codecs (kernels/build, errors, made, schedule).
DEMO_FILES = 33
DILOCO_FILES = 19


def calls_per_file(work: Callable[[], object]) -> Counter[str]:
    """How many Python functions of each file of the library are called, generators at each resumption too."""
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(SOURCE):
                calls[str(path.relative_to(SOURCE))] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


def four_tensors() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((64, 32), (32,), (16, 32), (16,))]


def take_steps(opt: Algorithm, params: list[nn.Parameter], steps: int) -> None:
    for number in range(steps):
        give_gradients(params, number)
        opt.step()


def give_gradients(params: list[nn.Parameter], number: int) -> None:
    chance = torch.Generator().manual_seed(number)
    for p in params:
        p.grad = torch.randn(p.shape, generator=chance)


def traced_demo_step() -> Counter[str]:
    params = four_tensors()
    opt = thinwire.DeMo(params, SoloLink(), lr=1e-3, codec=DCT(16) >> TopK(8))
    take_steps(opt, params, 3)
    give_gradients(params, 3)
    return calls_per_file(opt.step)


def traced_diloco_round() -> Counter[str]:
    params = four_tensors()
    opt = thinwire.DiLoCo(torch.optim.SGD(params, lr=0.1), SoloLink(), H=4)
    take_steps(opt, params, 7)
    give_gradients(params, 7)
    before = opt.rounds
    calls = calls_per_file(opt.step)
    assert opt.rounds == before + 1
    return calls


def listed(calls: Counter[str], most: int) -> str:
    lines = [f"{count:6} calls  {name}" for name, count in calls.most_common()]
    return "\n".join([f"{len(calls)} files, at most {most} are allowed:", *lines])


def test_a_step_of_demo_crosses_few_files() -> None:
    calls = traced_demo_step()
    assert len(calls) <= DEMO_FILES, listed(calls, DEMO_FILES)


def test_a_round_of_diloco_crosses_few_files() -> None:
    calls = traced_diloco_round()
    assert len(calls) <= DILOCO_FILES, listed(calls, DILOCO_FILES)


def test_the_trace_sees_what_a_step_is_made_of() -> None:
    """A trace that sees nothing would pass."""
    demo, diloco = traced_demo_step(), traced_diloco_round()
    assert {"algorithms/demo.py", "core/optimizer.py", "codecs/selection.py"} <= set(demo)
    assert {"algorithms/diloco.py", "core/optimizer.py", "links/base.py"} <= set(diloco)
    assert calls_per_file(lambda: Tensor.sum(torch.ones(3))) == {}
