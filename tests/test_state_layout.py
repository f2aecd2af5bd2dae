"""`state_layout`: which state an optimizer keeps, and whose it is."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.training import NAMES, H, build, codec_of, model_of, train
from thinwire import SoloLink, World
from thinwire.core.state_layout import StateLayout, state_layout


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [0, H + 1])
def test_it_lists_the_state_dict_and_says_whose_each_entry_is(name: str, steps: int) -> None:
    model = model_of()
    opt = build(name, model.parameters(), SoloLink(), codec=codec_of(name, True))
    train(model, opt, 0, steps)
    layout, saved = state_layout(opt), opt.state_dict()
    assert [each.index for each in layout.parameters] == list(range(len(list(model.parameters()))))
    assert all(a.param is b for a, b in zip(layout.parameters, model.parameters(), strict=True))
    for each in layout.parameters:
        assert [entry.key for entry in each.entries] == list(saved["state"].get(each.index, {}))
        assert each.trained == each.param.requires_grad
        assert each.replicated == (not each.trained or "param" in opt.replicated)
        for entry in each.entries:
            assert entry.inner == entry.key.startswith("inner")
            assert entry.replicated == (("inner" if entry.inner else entry.key) in opt.replicated)
            assert entry.coded == (entry.key in layout.coded)
            assert entry.joiner_copies == opt.joiner_copies(entry.key)
    assert [id(p) for p in layout.trained] == [id(p) for p in model.parameters() if p.requires_grad]
    assert set(layout.counters) <= set(saved["param_groups"][0])


def test_what_it_calls_replicated_is_bit_equal_on_all_workers() -> None:
    def worker(link: object) -> tuple[StateLayout, list[dict[str, torch.Tensor]]]:
        model = model_of()
        opt = build("diloco", model.parameters(), link)  # type: ignore[arg-type]
        train(model, opt, link.rank, H + 1)  # type: ignore[attr-defined]
        return state_layout(opt), [dict(v) for v in opt.state_dict()["state"].values()]

    (layout, first), (_, second) = World(2).run(worker)
    entries = [each.entries for each in layout.parameters if each.entries]
    same = {
        entry.key: all(torch.equal(a[entry.key], b[entry.key]) for a, b in zip(first, second, strict=True))
        for entry in entries[0]
    }
    replicated = {entry.key for entry in entries[0] if entry.replicated}
    assert replicated == {"anchor", "momentum"}
    assert all(same[key] for key in replicated)
    assert not all(same.values()), "the inner optimizers have gone their own ways"
