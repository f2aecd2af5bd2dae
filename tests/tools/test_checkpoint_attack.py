"""Checkpoints: damaged, from an untrusted source, or written with a hostile worker. Refused, and nothing is run or lost."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conformance.training import H, assert_same, build, model_of, named, snapshot, train
from tests.processes import Pool
from tests.tiers import examples
from thinwire import Algorithm, Link, SoloLink, World, checkpoint
from thinwire.checkpoint.files import read_sums, sum_of, write_sums
from thinwire.errors import CheckpointError
from thinwire.links import LinkDecorator, Ticket
from thinwire.network import Op
from thinwire.payload import Payload
from thinwire.tools.config import RunConfig
from thinwire.tools.train import Trainer

ROOT = Path(__file__).parents[2]
FLIPS = 600


def _saved(folder: Path, steps: int = 3, name: str = "diloco") -> tuple[Path, nn.Module, Algorithm]:
    model = model_of()
    opt = build(name, model.parameters(), SoloLink())
    train(model, opt, 0, steps)
    return checkpoint.save(folder, model, opt, SoloLink()), model, opt


def _everything(model: nn.Module, opt: Algorithm) -> list[Tensor]:
    state = opt.state_dict()
    tensors = [torch.as_tensor(v) for entries in state["state"].values() for _, v in sorted(entries.items())]
    return [*snapshot(model), *(t.clone() for t in tensors), torch.tensor([opt.steps, opt.rounds, opt.pending_steps])]


def _sign(path: Path) -> None:
    """Give every file the checksum that it has now, as whoever makes a checkpoint can."""
    names = [p.name for p in path.iterdir() if p.name != "SHA256SUMS"]
    write_sums(path, {name: sum_of(path / name) for name in names})


def _load_or_say(path: Path, model: nn.Module, opt: Algorithm) -> str:
    """Why a checkpoint was refused; "" where it was not."""
    try:
        checkpoint.load(path, model, opt, SoloLink())
    except CheckpointError as error:
        return str(error)
    return ""


# --- Damage --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["diloco", "demo", "mt-dao"])
def test_no_flipped_bit_of_any_file_goes_unnoticed(name: str, tmp_path: Path) -> None:
    path, _, _ = _saved(tmp_path, name=name)
    model = model_of(seed=7)
    opt = build(name, model.parameters(), SoloLink())
    before = _everything(model, opt)
    chance = random.Random(0)
    files = sorted(path.iterdir())
    assert [f.name for f in files] == ["SHA256SUMS", "replicated.0.safetensors", "thinwire.json", "worker0.0.safetensors"]
    for trial in range(FLIPS // 3):
        file = files[trial % len(files)]
        whole = file.read_bytes()
        at, bit = chance.randrange(len(whole)), chance.randrange(8)
        damaged = bytearray(whole)
        damaged[at] ^= 1 << bit
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            checkpoint.load(path, model, opt, SoloLink())
        file.write_bytes(whole)
    assert_same(before, _everything(model, opt), "a refused checkpoint changes nothing")
    assert checkpoint.load(path, model, opt, SoloLink()).step == 3


def test_a_file_of_an_older_step_or_another_run_is_refused(tmp_path: Path) -> None:
    model = model_of()
    opt = build("diloco", model.parameters(), SoloLink())
    paths = []
    for step in (1, 2):
        train(model, opt, 0, 1, first=step)
        paths.append(checkpoint.save(tmp_path / "a", model, opt, SoloLink()))
    other, _, _ = _saved(tmp_path / "b", steps=2)
    old, new = paths
    kept = {f.name: f.read_bytes() for f in new.iterdir()}
    before = _everything(model, opt)
    for name in ("worker0.0.safetensors", "replicated.0.safetensors"):
        for source, signed, said in (
            (old, False, "SHA-256"),
            (old, True, "is of step 1, the checkpoint is of step 2"),
            (other, True, "is of run "),
        ):
            shutil.copy(source / name, new / name)
            if signed:
                _sign(new)
            with pytest.raises(CheckpointError, match=said):
                checkpoint.load(new, model, opt, SoloLink())
            for file, content in kept.items():
                (new / file).write_bytes(content)
    shutil.rmtree(new)
    old.rename(new)  # an older checkpoint under a newer name
    with pytest.raises(CheckpointError, match="it holds a checkpoint of step 1"):
        checkpoint.load(new, model, opt, SoloLink())
    assert_same(before, _everything(model, opt))


def _places(value: Any, at: tuple = ()) -> Iterator[tuple]:
    """The place of every value in a JSON document."""
    if at:
        yield at
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inside:
        yield from _places(below, (*at, key))


def _nested(depth: int) -> str:
    return "[" * depth + "]" * depth


ODD = [None, -1, 10**30, 1.5, "x", "__class__", True, [], {}, [[]], {"a": [1]}, float("nan"), "../../etc/passwd"]


def test_an_untrusted_description_is_refused_or_harmless(tmp_path: Path) -> None:
    """Every value is removed and replaced by odd ones, and signed anew: a `CheckpointError` or a good load, nothing else."""
    path, _, _ = _saved(tmp_path)
    text = (path / "thinwire.json").read_text()
    description = json.loads(text)
    chance = random.Random(1)
    tensors = chance.sample(sorted(description["tensors"]), 5)
    description["tensors"] = {k: v for k, v in description["tensors"].items() if k in tensors}
    places = chance.sample(found := list(_places(description)), min(examples(240), len(found)))
    description = json.loads(text)
    refused = 0
    for place in places:
        for odd in ("removed", *chance.sample(ODD, 3)):
            changed = copy.deepcopy(description)
            inside = changed
            for key in place[:-1]:
                inside = inside[key]
            if odd == "removed":
                del inside[place[-1]]
            else:
                inside[place[-1]] = odd
            (path / "thinwire.json").write_text(json.dumps(changed))
            _sign(path)
            model = model_of(seed=7)
            opt = build("diloco", model.parameters(), SoloLink())
            before = _everything(model, opt)
            said = _load_or_say(path, model, opt)
            if said:
                refused += 1
                assert len(said) < 700
                assert_same(before, _everything(model, opt), f"{place} = {odd!r}")
    assert refused > len(places)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "1", '"x"', "{}", _nested(100_000), '{"format": 2}', "\x00", '{"format": ' + "9" * 5000 + "}"],
)
def test_a_description_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    path, model, opt = _saved(tmp_path)
    (path / "thinwire.json").write_text(text)
    _sign(path)
    with pytest.raises(CheckpointError):
        checkpoint.load(path, model, opt, SoloLink())


def test_untrusted_tensor_files_are_refused(tmp_path: Path) -> None:
    path, model, opt = _saved(tmp_path)
    before = _everything(model, opt)
    name = "worker0.0.safetensors"
    whole = (path / name).read_bytes()
    header = int.from_bytes(whole[:8], "little")
    hostile = [
        b"",
        b"\xff" * 8,
        (2**63).to_bytes(8, "little") + whole[8:],
        (header + 1).to_bytes(8, "little") + whole[8:],
        whole[: header + 20],
        whole[:8] + b"{" * header + whole[8 + header :],
        pickle.dumps({"x": 1}),
    ]
    chance = random.Random(2)
    for _ in range(100):  # signed flips in the header: shapes, dtypes, offsets, names
        flipped = bytearray(whole)
        flipped[chance.randrange(8 + header)] ^= 1 << chance.randrange(8)
        hostile.append(bytes(flipped))
    for content in hostile:
        (path / name).write_bytes(content)
        _sign(path)
        if not _load_or_say(path, model, opt):
            assert_same(before, _everything(model, opt), "what loads is what was saved")


def test_every_kind_of_damage_falls_back_to_the_older_good_one(tmp_path: Path) -> None:
    config = RunConfig(task="quadratic", steps=6, eval_every=0, device="cpu", settings={"H": 2})

    def worker(link: Link, damage: Callable[[Path], object], folder: Path) -> tuple[list[str], int]:
        Trainer(config, link).run(lambda _: None, checkpoints=folder, checkpoint_every=2)
        link.all_gather(Payload.of_bytes(b"saved", fixed=True))
        if link.rank == 0:
            damage(folder / "step-00000006")
        link.all_gather(Payload.of_bytes(b"hurt!", fixed=True))
        trainer = Trainer(config, link)
        return trainer.resume(folder), trainer.step

    kinds: dict[str, Callable[[Path], object]] = {
        "one worker's file": lambda p: (p / "worker1.0.safetensors").write_bytes(b"1234"),
        "the first worker's file": lambda p: (p / "worker0.0.safetensors").unlink(),
        "no checksums": lambda p: (p / "SHA256SUMS").unlink(),
        "empty checksums": lambda p: (p / "SHA256SUMS").write_bytes(b""),
        "no groups": lambda p: ((p / "thinwire.json").write_text('{"format": 2, "step": 6}'), _sign(p)),
        "deep nesting": lambda p: ((p / "thinwire.json").write_text(_nested(100_000)), _sign(p)),
        "an older format": lambda p: ((p / "thinwire.json").write_text('{"format": 1}'), (p / "SHA256SUMS").unlink()),
        "not text": lambda p: ((p / "thinwire.json").write_bytes(b"\xff\xfe"), _sign(p)),
    }
    for number, (kind, damage) in enumerate(kinds.items()):
        folder = tmp_path / str(number)
        for notes, step in World(2).run(lambda link, d=damage, f=folder: worker(link, d, f)):
            assert step == 4, kind
            assert "step-00000006" in notes[0], kind
            assert notes[-1] == "resumed from step 4"


# --- No code of others ---------------------------------------------------------------------------------------------------


class _Evil:
    """A pickle of it writes a file where it is loaded."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple:
        return Path.write_text, (self.mark, "executed")


def test_an_untrusted_checkpoint_runs_no_code(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    evil = pickle.dumps(_Evil(mark))
    path, model, opt = _saved(tmp_path / "run")
    names = [
        ".metadata",
        "__0_0.distcp",
        "model.pt",
        "worker0.0.safetensors",
        "replicated.0.safetensors",
        "thinwire.json",
        "SHA256SUMS",
    ]
    for name in names:
        trial = tmp_path / "trial" / path.name
        shutil.copytree(path, trial)
        (trial / name).write_bytes(evil)
        if name != "SHA256SUMS":
            _sign(trial)
        _load_or_say(trial, model, opt)
        assert not mark.exists(), f"{name} was unpickled"
        shutil.rmtree(trial)
    pickle.loads(evil)
    assert mark.read_text() == "executed", "the attack works where somebody unpickles it"


def test_a_checkpoint_of_the_format_before_is_refused_without_a_look_at_its_pickle(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    path = tmp_path / "step-00000003"
    path.mkdir()
    (path / "thinwire.json").write_text(json.dumps({"format": 1, "step": 3, "workers": 1}))
    (path / ".metadata").write_bytes(pickle.dumps(_Evil(mark)))
    model = model_of()
    opt = build("diloco", model.parameters(), SoloLink())
    with pytest.raises(CheckpointError, match="has format 1, which thinwire no longer reads, since it holds a pickle"):
        checkpoint.load(path, model, opt, SoloLink())
    assert not mark.exists()


FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "torch.distributed.checkpoint"}
FORBIDDEN_CALLS = {
    "load": "torch",
    "all_gather_object": "",
    "broadcast_object_list": "",
    "gather_object": "",
    "scatter_object_list": "",
    "send_object_list": "",
    "recv_object_list": "",
    "eval": "",
    "exec": "",
}


@pytest.mark.parametrize("folder", ["src", "examples", "benchmarks", "docs"])
def test_our_code_unpickles_nothing(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            imported = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            assert not FORBIDDEN_MODULES & set(imported), f"{path} imports {imported}"
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                before, _, last = called.rpartition(".")
                owner = FORBIDDEN_CALLS.get(last)
                if owner == "" and (last not in ("eval", "exec") or not before):
                    raise AssertionError(f"{path}:{node.lineno} calls {called}")
                assert not (owner == "torch" and before == "torch"), f"{path}:{node.lineno} calls {called}"
                keywords = {keyword.arg for keyword in node.keywords}
                assert not keywords & {"allow_pickle", "weights_only"}, f"{path}:{node.lineno} calls {called} with {keywords}"


# --- A hostile worker --------------------------------------------------------------------------------------------------


class Hostile(LinkDecorator):
    """Sends other bytes than it should in the exchanges of a checkpoint."""

    def __init__(self, link: Link, raw: bytes, exchange: int):
        super().__init__(link)
        self.raw, self.exchange, self.seen = raw, exchange, 0

    def post(self, payload: Payload, op: Op) -> Ticket:
        if payload.purpose == "checkpoint":
            self.seen += 1
            if self.seen == self.exchange:
                raw = self.raw[: payload.nbytes].ljust(payload.nbytes)
                payload = payload.like(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        return self.link.post(payload, op)


def _messages(mark: Path) -> list[bytes]:
    name = "../../evil.safetensors " + "0" * 64
    return [
        pickle.dumps(_Evil(mark)),
        b"\xff" * 1024,
        b"",
        _nested(500).encode(),
        b'[1, 0, {"told": 1}]',
        b'[1, 0, {"told": "x", "failed": "y"}]',
        b'["1", 0, {"told": "x"}]',
        b'{"told": "x"}',
        json.dumps([1, 0, {"failed": "\x1b[2J\x1b[1;1H" + "a" * 800}]).encode(),
        json.dumps([1, 0, {"told": name}]).encode(),
        json.dumps([1, 0, {"told": ""}]).encode(),
    ]


def _save_with_a_hostile_worker(link: Link, folder: Path, raw: bytes, exchange: int) -> tuple[str, list[str]]:
    model = model_of()
    opt = build("diloco", model.parameters(), link)
    train(model, opt, link.rank, 1)
    checkpoint.save(folder, model, opt, link)
    train(model, opt, link.rank, 1, first=2)
    used = Hostile(link, raw, exchange) if link.rank == 1 else link
    said = "saved"
    try:
        checkpoint.save(folder, model, opt, used)
    except CheckpointError as error:
        said = str(error)
    link.all_gather(Payload.of_bytes(b"done", fixed=True))
    return said, [p.name for p in checkpoint.finished(folder)]


@pytest.mark.parametrize("exchange", [1, 2, 3])
def test_a_hostile_worker_runs_no_code_and_ends_the_save_on_all_workers(exchange: int, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    refused = 0
    for number, raw in enumerate(_messages(mark)):
        folder = tmp_path / str(number)
        results = World(3).run(lambda link, f=folder, r=raw: _save_with_a_hostile_worker(link, f, r, exchange))
        said = [text for text, _ in results]
        if said[0] != "saved":  # what the hostile worker says to itself is its own affair
            refused += 1
            assert said[2] != "saved" or exchange > 1
            assert all(c.isprintable() for text in said for c in text)
            assert max(map(len, said)) < 700
        assert {name for _, kept in results for name in kept} <= {"step-00000001", "step-00000002"}
        assert all("step-00000001" in kept for _, kept in results), "what was saved before is untouched"
        assert not mark.exists()
    assert refused >= 8


def test_a_hostile_worker_on_real_processes(tmp_path: Path, pool: Pool) -> None:
    mark = tmp_path / "executed"
    results = pool.run(_save_with_a_hostile_worker, 3, tmp_path / "run", pickle.dumps(_Evil(mark)), 2)
    for said, kept in results:
        assert "rank 1 sent an invalid status" in said
        assert kept == ["step-00000001"]
    assert not mark.exists()


# --- Runs and folders ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", named())
def test_the_simulator_saves_and_resumes_all_workers(name: str, tmp_path: Path) -> None:
    def straight(link: Link) -> list[Tensor]:
        model = model_of()
        opt = build(name, model.parameters(), link)
        train(model, opt, link.rank, H + 1)
        checkpoint.save(tmp_path, model, opt, link, extra={"mine": link.rank})
        train(model, opt, link.rank, H, first=H + 2)
        return snapshot(model)

    def resumed(link: Link) -> list[Tensor]:
        model = model_of(seed=9)
        opt = build(name, model.parameters(), link)
        assert checkpoint.load(checkpoint.finished(tmp_path)[-1], model, opt, link).extra == {"mine": link.rank}
        train(model, opt, link.rank, H, first=H + 2)
        return snapshot(model)

    for a, b in zip(World(3).run(straight), World(3).run(resumed), strict=True):
        assert_same(a, b)


def test_a_new_run_does_not_save_into_the_folder_of_another(tmp_path: Path) -> None:
    path, _, _ = _saved(tmp_path)
    kept = {f.name: f.read_bytes() for f in path.iterdir()}
    model = model_of()
    opt = build("diloco", model.parameters(), SoloLink())
    with pytest.raises(CheckpointError, match=r"holds a checkpoint of another run \(step 3, DiLoCo\): load it first"):
        checkpoint.save(tmp_path, model, opt, SoloLink())
    assert {f.name: f.read_bytes() for f in path.iterdir()} == kept
    assert not list(tmp_path.glob(".writing-*"))

    checkpoint.load(path, model, opt, SoloLink())  # now it goes on with that run
    train(model, opt, 0, 1, first=4)
    checkpoint.save(tmp_path, model, opt, SoloLink(), keep=1)
    assert [p.name for p in checkpoint.finished(tmp_path)] == ["step-00000004"]


def test_what_cannot_be_read_is_not_removed(tmp_path: Path) -> None:
    path, model, opt = _saved(tmp_path)
    (path / "SHA256SUMS").write_bytes(b"?")
    for step in (4, 5, 6):
        train(model, opt, 0, 1, first=step)
        checkpoint.save(tmp_path, model, opt, SoloLink(), keep=1)
    assert [p.name for p in checkpoint.finished(tmp_path)] == ["step-00000003", "step-00000006"]


def test_checksums_are_those_of_coreutils(tmp_path: Path) -> None:
    path, _, _ = _saved(tmp_path)
    assert read_sums(path).keys() == {"replicated.0.safetensors", "thinwire.json", "worker0.0.safetensors"}
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
