"""Parameter groups that are added later: what one method refuses of them, and messages that are under way meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conformance.training import Awkward, assert_same, backward, build, model_of, snapshot
from tests.tiers import first_quick
from thinwire import MTDAO, Dense, Link, LocalSGD, SoloLink, StreamingDiLoCo, World
from thinwire.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "settings"),
    first_quick(
        [
            ("streaming-diloco", {"fragments": 2, "tau": 3, "layout": "strided"}),
            ("demo", {"delay": True, "phi": "adam"}),
            ("streaming-diloco", {"fragments": 1, "tau": 1}),
            ("demo", {"delay": True}),
        ],
        quick=1,
    ),
)
def test_a_group_that_comes_while_a_message_is_under_way_is_not_part_of_it(name: str, settings: dict[str, Any]) -> None:
    def trained(link: Link, at: int) -> tuple[list[Tensor], Awkward]:
        model = model_of()
        added = [model.gain, model.second.weight, model.sometimes]
        opt = build(name, [{"params": list(model.first.parameters())}], link, alarm_every=1, **settings)
        for step in range(1, 20):
            if step == at:
                opt.add_param_group({"params": added})
            backward(model, link.rank, step)
            if step < at:
                for p in added:
                    p.grad = None
            opt.step()
            opt.zero_grad()
            model.zero_grad()
        opt.finish()
        return snapshot(model), model

    for at in range(2, 10):
        (mine, model), (other, _) = World(2).run(lambda link, at=at: trained(link, at))
        assert_same(mine, other)
        assert not torch.equal(model.second.weight, model_of().second.weight), "the added group is trained"


def test_fragments_by_hand_take_no_parameter_that_none_of_them_names() -> None:
    model = model_of()
    fragments = [[model.first.weight], [model.first.bias]]
    opt = StreamingDiLoCo(torch.optim.SGD(model.first.parameters(), lr=0.1), SoloLink(), H=4, fragments=fragments)
    with pytest.raises(ConfigError, match=r"no fragment names the parameter of shape \(3, 7\)"):
        opt.add_param_group({"params": [model.second.weight]})
    assert len(opt.param_groups) == len(opt.inner.param_groups) == 1
    for p in (model.second.weight, model.gain, model.sometimes):
        p.requires_grad_(False)
    for step in range(1, 9):
        backward(model, 0, step)
        opt.step()


def test_what_the_wire_would_round_is_refused_of_added_groups_too() -> None:
    for method in (LocalSGD, MTDAO):
        narrow, wide = (nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
        opt = method(torch.optim.SGD([narrow], lr=0.1), SoloLink(), H=4, codec=Dense("bf16"))
        with pytest.raises(ConfigError, match=r"would round (torch.float32 weights|the parameters added)"):
            opt.add_param_group({"params": [wide]})
        assert len(opt.param_groups) == 1 and wide not in opt.state and wide not in opt.inner.state


def test_a_state_without_a_period_is_refused_of_added_groups() -> None:
    first, second = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    opt = MTDAO(torch.optim.SGD([first], lr=0.1), SoloLink(), H=4)
    with pytest.raises(ConfigError, match="SGD keeps 'momentum_buffer' of the parameters added, and MTDAO knows of param only"):
        opt.add_param_group({"params": [second], "momentum": 0.9})
    assert len(opt.param_groups) == 1 and second not in opt.inner.state


def test_demos_adam_refuses_an_eps_that_is_zero_in_the_parameters_dtype() -> None:
    half = nn.Parameter(torch.zeros(3, 3, dtype=torch.float16))
    with pytest.raises(ConfigError, match="phi = adam has eps=1e-08, which is 0 in float16"):
        build("demo", [half], SoloLink(), phi="adam")
    for settings in ({"phi": "adam", "eps": 1e-4}, {"phi": "unit"}):
        opt = build("demo", [half], SoloLink(), **settings)
        for _ in range(3):
            half.grad = torch.zeros_like(half)
            opt.step()
        assert bool(torch.isfinite(half).all())
