"""Triton kernels: how they are chosen, how often they are launched; in the interpreter, and compiled for real cards."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.pair import SIZES, gpt_shapes
from torch import nn

import thinwire
from tests.test_syncs import Launches, Meta
from thinwire import DCT, DeMo, Int8, Link, Sign, TopK, World, kernels
from thinwire.codecs import Chain
from thinwire.codecs.device import fused
from thinwire.core import deferred
from thinwire.errors import ConfigError, FingerprintMismatch
from thinwire.kernels import triton
from thinwire.kernels.triton import start as starting

needs_triton = pytest.mark.skipif(not starting.installed(), reason='no Triton: pip install "thinwire[triton]"')
CUDA = torch.device("cuda", 0)
ROOT = Path(__file__).parents[2]


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


def interpreted(tier: str) -> None:
    """Run the tests of `interpreted.py` in a process in which nothing has imported triton yet."""
    path = str(ROOT / "tests" / "kernels" / "interpreted.py")
    told = run("pytest", "-q", "-p", "no:cacheprovider", path, "-m", tier, TRITON_INTERPRET="1", THINWIRE_KERNELS="auto")
    assert " passed" in told and "skipped" not in told.splitlines()[-1]


@needs_triton
def test_messages_means_and_verdicts_in_the_interpreter() -> None:
    interpreted("not slow")


@needs_triton
@pytest.mark.slow
def test_everything_in_the_interpreter() -> None:
    interpreted("slow")


@needs_triton
def test_all_kernels_compile_for_real_cards_and_fit() -> None:
    rows = json.loads(run("benchmarks.triton_kernels", "--json", "--no-record", TRITON_INTERPRET="0"))
    assert {row["sm"] for row in rows} == {80, 90} and {row["k"] for row in rows} >= {32, 128}
    assert {row["function"] for row in rows} == {name for names in starting._MODULES.values() for name in names}
    for row in rows:
        assert row["shared B"] <= 48 << 10 and row["spilled B"] <= 100, row


# --- Which kernels are used ---------------------------------------------------------------------------------------------------


def test_only_modules_of_kernels_import_triton() -> None:
    source = Path(thinwire.__file__).parent
    importing = set()
    for path in source.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:  # within functions it may be imported
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "triton" for name in names):
                importing.add(str(path.relative_to(source)))
    assert importing == {f"kernels/triton/{name}.py" for name in starting._MODULES}
    loading = [str(p.relative_to(source)) for p in source.rglob("*.py") if "triton.trial import" in p.read_text()]
    assert loading == ["kernels/triton/start.py"]


def test_which_messages_the_kernels_know() -> None:
    known = [DCT(64) >> TopK(k) >> Sign() for k in (8, 32, 40, 128, 256)] + [(DCT(64) >> TopK(32) >> Sign()).split(3)]
    others = [DCT(64) >> TopK(32) >> Int8(), DCT(32) >> TopK(32) >> Sign(), DCT(64) >> TopK(32) >> Sign(64)]
    others += [DCT(64) >> TopK(k) >> Sign() for k in (1, 4, 33, 264, 1024)]
    assert all(map(fused.in_triton, known)) and not any(map(fused.in_triton, others))


def test_the_switch_a_missing_triton_and_a_card_that_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(starting, "possible", lambda device: device.type == "cuda")
    monkeypatch.setattr(starting, "installed", lambda: True)
    monkeypatch.setattr(starting, "_tried", lambda device: "triton-of-this-card")
    monkeypatch.setenv(kernels.SETTING, "auto")
    assert starting.name(CUDA) == "triton-of-this-card" and starting.available(CUDA)
    assert starting.name(torch.device("cpu")) == "off" and not starting.available(torch.device("cpu"))
    monkeypatch.setenv(kernels.SETTING, "off")
    assert starting.name(CUDA) == "off"
    monkeypatch.setenv(kernels.SETTING, "of")
    with pytest.raises(ConfigError, match=f"{kernels.SETTING}.*'of'"):
        starting.name(CUDA)
    monkeypatch.setenv(kernels.SETTING, "auto")
    monkeypatch.setattr(starting, "installed", lambda: False)
    assert starting.name(CUDA) == "off"
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "thinwire.kernels.triton.trial", None)  # cannot be imported
    assert starting._tried.__wrapped__(CUDA) == "off"
    assert [r.message for r in caplog.records if "Triton kernels cannot be used" in r.message]


class OnSecondCard(torch.Tensor):
    device = torch.device("cuda", 1)  # type: ignore[assignment]


def test_a_kernel_is_started_on_the_card_that_its_tensors_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would start it on the current one."""
    current: list[torch.device | None] = [None]

    @contextlib.contextmanager
    def made_current(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **__: seen.append(current[-1])

    seen: list[torch.device | None] = []
    monkeypatch.setattr(torch.cuda, "device", made_current)
    monkeypatch.setattr(starting, "_kernel", lambda _: Kernel())
    monkeypatch.setitem(sys.modules, "triton.language", SimpleNamespace())
    starting.launch("encode", (1,), 7, torch.empty(3).as_subclass(OnSecondCard))
    starting.launch("encode", (1,), 7, torch.empty(3))
    assert seen == [torch.device("cuda", 1), None]


def test_workers_with_and_without_the_kernels_refuse_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are given here; in the interpreter they are those of the kernels."""
    monkeypatch.setattr(triton, "possible", lambda _: True)
    chain = DCT(64) >> TopK(32) >> Sign()
    monkeypatch.setattr(triton, "name", lambda _: "triton-1")
    assert fused.arithmetic(chain, CUDA) == "triton-1"
    assert fused.arithmetic(Chain.of(DCT(64) >> TopK(32) >> Int8()), CUDA) == ""

    class Named(DeMo):
        def fingerprint(self) -> dict[str, object]:
            return {**super().fingerprint(), "Triton kernels": "off" if self.link.rank else "triton-1"}

    def work(link: Link) -> str:
        p = nn.Parameter(torch.ones(64, 64))
        p.grad = torch.ones(64, 64)
        try:
            Named([p], link).step()
        except FingerprintMismatch as refusal:
            return str(refusal)
        return ""

    for told in World(2).run(work):
        assert "Triton kernels is 'triton-1' on rank 0 and 'off' on rank 1: install thinwire[triton] on all workers" in told


# --- How often they are launched ----------------------------------------------------------------------------------------------

MOST = 150  # launches of a round of DeMo at 124M parameters and 8 workers


def launches(monkeypatch: pytest.MonkeyPatch, shapes: list[tuple[int, ...]], **settings: Any) -> tuple[int, Counter[str]]:
    """Operations and kernels of a round on the meta device, where kernels are counted and not started."""
    kinds: Counter[str] = Counter()
    monkeypatch.setattr(triton, "available", lambda _: True)
    for module in (triton, starting):
        monkeypatch.setattr(module, "launch", lambda kernel, grid, *_, **__: kinds.update([kernel]))
    monkeypatch.setattr(deferred, "Later", lambda numbers: type("Nothing", (), {"read": lambda _: [0.0] * numbers.numel()})())
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    opt = DeMo(params, Meta(), alarm_every=0, **settings)
    opt.handshake_done = True
    for _ in range(2):
        for p in params:
            p.grad = torch.empty_like(p)
        kinds.clear()
        with Launches() as operations:
            opt.step()
    return operations.names.total() + kinds.total(), kinds


@pytest.mark.parametrize("k", [128, 32])
def test_launches_of_a_round_at_124m_parameters_and_8_workers(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    total, kinds = launches(monkeypatch, gpt_shapes(*SIZES["124M"]), codec=DCT(64) >> TopK(k) >> Sign())
    print(f"{total} launches, {kinds.total()} of them kernels: {kinds}")
    assert kinds["encode"] == kinds["encode_rows"] == kinds["read"] == 1 and kinds["combine"] == 2
    assert total <= MOST


def test_launches_do_not_grow_with_the_number_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (launches(monkeypatch, [(128, 64), (64,)] * n)[0] for n in (1, 20))
    assert few == many
