"""examples/fsdp2_flexdemo.py runs under torchrun, and the figures that it prints are right."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_examples import run
from thinwire.codecs import parse_codec
from thinwire.core.average import message_nbytes
from thinwire.errors import ConfigError
from thinwire.links import SoloLink
from thinwire.network import show_bytes
from thinwire.tasks import make_task

SCRIPT = Path(__file__).parents[1] / "examples" / "fsdp2_flexdemo.py"
STEPS = 2


@pytest.fixture(scope="module")
def settings() -> Any:
    """The script's settings class; nothing is run."""
    spec = importlib.util.spec_from_file_location("fsdp2_flexdemo", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by its name
    try:
        spec.loader.exec_module(module)
        yield module.Settings
    finally:
        del sys.modules[spec.name]


@pytest.mark.slow
def test_on_2_workers_of_2_shards(settings: Any) -> None:
    output = run(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(SCRIPT), "--steps", str(STEPS)])
    assert len(re.findall(r"step +2: training loss \d\.\d{3} ", output)) == 1, "one process speaks"
    assert len(re.findall(r"validation loss \d\.\d{4}, the same on all 2 workers", output)) == 1
    shapes = [p.shape for p in make_task("gpt-nano").model().parameters()]
    halves = [torch.empty(shape[0] // 2, *shape[1:], device="meta") for shape in shapes]
    handshake = 32
    sent = message_nbytes(SoloLink(), parse_codec(settings().wire), halves) + handshake / STEPS  # once to the other worker
    assert f"per step: {show_bytes(sent)} per process, {show_bytes(2 * sent)} per worker\n" in output
    dense = 4 * sum(shape.numel() for shape in shapes)  # a ring of two sends all of it
    assert re.search(rf"fp32 DDP would send there: +{show_bytes(dense)} per worker, {dense / (2 * sent):.0f}x", output)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({}, r"--workers 2 x --shards 2 are 4 processes, got 6: start it by torchrun --nproc-per-node 4"),
        ({"shards": 0}, "--shards must be a whole number of at least 1, got 0"),
        ({"steps": 0}, "--steps must be a whole number of at least 1, got 0"),
        ({"lr": -1.0}, "--lr must be above 0 and finite, got -1.0"),
        ({"wire": "mp3"}, "'mp3' is no codec; a codec is one of fp32"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_by_name(
    wrong: dict[str, Any], told: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ConfigError, match=told):
        settings(**wrong).check()
    settings(workers=3).check()
