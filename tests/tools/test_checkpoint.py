from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.conformance.test_sharded import uneven
from tests.conformance.training import ALGORITHMS, H, adamw, assert_same, build, model_of, named, sgd, snapshot, train
from tests.processes import LIMIT, Pool
from tests.tiers import first_quick
from thinwire import Link, SoloLink, TorchLink, Wrapper, checkpoint
from thinwire.checkpoint.files import read_sums, sum_of, write_sums
from thinwire.errors import CheckpointError
from thinwire.sharding.mesh import make_mesh, shard_model
from thinwire.sharding.shards import local, reshard

STOP = H + 2


def _save_then_train_on(link: TorchLink, name: str, folder: Path) -> list:
    model = model_of()
    opt = build(name, model.parameters(), link)
    train(model, opt, link.rank, STOP)
    checkpoint.save(folder, model, opt, link, extra={"sent": 100.0 + link.rank})
    train(model, opt, link.rank, 2 * H, first=STOP + 1)
    return snapshot(model)


def _load_and_train_on(link: TorchLink, name: str, folder: Path) -> tuple:
    model = model_of(seed=99)
    opt = build(name, model.parameters(), link)
    resumed = checkpoint.load(checkpoint.finished(folder)[-1], model, opt, link)
    start = snapshot(model), opt.steps, opt.pending_steps
    train(model, opt, link.rank, 2 * H, first=STOP + 1)
    return snapshot(model), resumed, start


@pytest.mark.parametrize("name", named())
def test_the_same_world_resumes_bit_for_bit_mid_interval(name: str, tmp_path: Path, pool: Pool) -> None:
    straight = pool.run(_save_then_train_on, 2, name, tmp_path)
    resumed = pool.run(_load_and_train_on, 2, name, tmp_path)
    for rank, (params, (again, result, _)) in enumerate(zip(straight, resumed, strict=True)):
        assert_same(params, again)
        assert (result.step, result.extra, result.notes) == (STOP, {"sent": 100.0 + rank}, [])


@pytest.mark.parametrize("name", named(lambda n: bool(ALGORITHMS[n].replicated)))
@pytest.mark.parametrize("size", first_quick([4, 1]))
def test_another_number_of_workers_takes_over_what_is_shared(name: str, size: int, tmp_path: Path, pool: Pool) -> None:
    pool.run(_save_then_train_on, 2, name, tmp_path)
    results = pool.run(_load_and_train_on, size, name, tmp_path)
    for params, resumed, (start, steps, pending) in results:
        assert steps == STOP
        assert_same(start, results[0][2][0], "all workers start from one point")
        assert torch.equal(start[1], model_of().frozen), "frozen parameters are taken over too"
        assert all(bool(torch.isfinite(p).all()) for p in params)
        if name == "data-parallel":
            assert resumed.notes == [], "everything is shared: nothing was lost"
        elif "param" in ALGORITHMS[name].replicated:
            assert "each worker's own: momentum" in "\n".join(resumed.notes)
        else:
            assert pending == 0
            here = build(name, model_of().parameters(), SoloLink())
            told = "of the first, and from its averaged states" if here.joiner_copies("param") else "agreed on last"
            notes = "\n".join(resumed.notes)
            assert told in notes
            if isinstance(here, Wrapper) and not here.joiner_copies("inner"):
                assert "the inner optimizer's state" in notes


def _refused(link: Link, name: str, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        _load_and_train_on(link, name, folder)
    return str(caught.value)


@pytest.mark.parametrize("name", named(lambda n: not ALGORITHMS[n].replicated))
def test_without_shared_state_the_number_of_workers_must_be_the_same(name: str, tmp_path: Path, pool: Pool) -> None:
    pool.run(_save_then_train_on, 2, name, tmp_path)
    assert "needs the 2 workers that wrote it: no shared parameters" in pool.run(_refused, 1, name, tmp_path)[0]


def test_replicated_state_is_written_once_and_per_worker_state_under_its_worker(tmp_path: Path, pool: Pool) -> None:
    pool.run(_save_then_train_on, 2, "diloco", tmp_path)
    path = checkpoint.finished(tmp_path)[-1]
    keys = json.loads((path / "thinwire.json").read_text())["tensors"].keys()
    assert "replicated/state/first.weight/anchor" in keys
    assert "replicated/state/first.weight/momentum" in keys
    for rank in range(2):
        assert f"worker{rank}/param/first.weight" in keys
        assert f"worker{rank}/state/first.weight/inner.exp_avg" in keys
    assert not any(k.startswith("worker") and k.endswith(("anchor", "momentum")) for k in keys)


def _sharded_round_trip(_: Link, folder: Path) -> tuple[list, list]:
    """On an HSDP mesh stock checkpointing takes the workers' momenta for copies of each other, and keeps one."""
    mesh = make_mesh(workers=2, shards=2)
    link = TorchLink(mesh["replicate"], timeout=LIMIT)
    model = shard_model(uneven(torch.float32), mesh)
    opt = build("diloco", model.parameters(), link)
    train(model, opt, link.rank, STOP)
    with torch.no_grad():
        model(torch.ones(1, 5), 2)  # leaves FSDP2's root gathered: saving must not take the gathered copy
    checkpoint.save(folder, model, opt, link)
    before = [t.clone() for t in _everything(opt)]
    model = shard_model(uneven(torch.float32), mesh)
    opt = build("diloco", model.parameters(), link)
    train(model, opt, link.rank, 1)
    checkpoint.load(checkpoint.finished(folder)[-1], model, opt, link)
    return before, [t.clone() for t in _everything(opt)]


def _everything(opt) -> list:
    moments = [t for tensors in opt.inner_state().values() for t in tensors]
    return [local(t) for t in [*opt.params(), *opt.slot("anchor"), *opt.slot("momentum"), *moments]]


def test_a_sharded_mesh_keeps_each_workers_own_state(tmp_path: Path, pool: Pool) -> None:
    results = pool.run(_sharded_round_trip, 4, tmp_path)
    for before, after in results:
        assert_same(before, after)
    first_worker, second_worker = results[0][0], results[2][0]
    assert any(not torch.equal(a, b) for a, b in zip(first_worker, second_worker, strict=True)), "momenta did differ"


@pytest.mark.parametrize(
    "inner", [sgd, adamw, lambda p: torch.optim.NAdam(p), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)]
)
@pytest.mark.parametrize("steps", [0, 3])
def test_any_inner_optimizer_also_before_its_first_step(inner, steps: int, tmp_path: Path) -> None:
    model = model_of()
    opt = build("diloco", model.parameters(), SoloLink(), inner=inner)
    train(model, opt, 0, steps)
    checkpoint.save(tmp_path, model, opt, SoloLink())
    other = model_of(seed=5)
    other_opt = build("diloco", other.parameters(), SoloLink(), inner=inner)
    checkpoint.load(checkpoint.finished(tmp_path)[-1], other, other_opt, SoloLink())
    for m, o in ((model, opt), (other, other_opt)):
        train(m, o, 0, 6, first=steps + 1)
    assert_same(snapshot(model), snapshot(other))


def test_buffers_and_random_state_come_back(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    opt = build("local-sgd", model.parameters(), SoloLink())
    model(torch.randn(8, 3))
    checkpoint.save(tmp_path, model, opt, SoloLink())
    mean, draw = model[1].running_mean.clone(), torch.rand(3)
    model(torch.randn(8, 3))
    checkpoint.load(checkpoint.finished(tmp_path)[-1], model, opt, SoloLink())
    assert torch.equal(model[1].running_mean, mean)
    assert torch.equal(torch.rand(3), draw)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    model = model_of()
    opt = build("data-parallel", model.parameters(), SoloLink())
    for step in range(1, 6):
        train(model, opt, 0, 1, first=step)
        checkpoint.save(tmp_path, model, opt, SoloLink(), keep=2)
    assert [p.name for p in checkpoint.finished(tmp_path)] == ["step-00000004", "step-00000005"]
    checkpoint.save(tmp_path, model, opt, SoloLink(), keep=2)  # the same step again replaces it
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000004", "step-00000005.1"], "nothing is left lying about"
    assert checkpoint.load(checkpoint.finished(tmp_path)[-1], model, opt, SoloLink()).step == 5


def test_the_newest_finite_one_is_kept_whatever_comes_after_it(tmp_path: Path) -> None:
    model = model_of()
    opt = build("diloco", model.parameters(), SoloLink())
    for step in range(1, 7):
        train(model, opt, 0, 1, first=step)
        if step >= 3:
            with torch.no_grad():
                model.gain.fill_(float("inf"))
        checkpoint.save(tmp_path, model, opt, SoloLink(), keep=2)
    assert [p.name for p in checkpoint.finished(tmp_path)] == ["step-00000002", "step-00000005", "step-00000006"]


def _batchnorm_run(link: TorchLink, folder: Path, save: bool) -> tuple:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    opt = build("data-parallel", model.parameters(), link)
    if save:
        torch.manual_seed(link.rank)
        model(torch.randn(8, 3))
        checkpoint.save(folder, model, opt, link, extra={"sent": 7.0})
        return model[1].running_mean.clone(), None
    resumed = checkpoint.load(checkpoint.finished(folder)[-1], model, opt, link)
    return model[1].running_mean.clone(), resumed


def test_another_world_takes_the_first_workers_buffers_and_says_so(tmp_path: Path, pool: Pool) -> None:
    first, _ = pool.run(_batchnorm_run, 2, tmp_path, True)[0]
    for mean, resumed in pool.run(_batchnorm_run, 4, tmp_path, False):
        assert torch.equal(mean, first)
        assert resumed.notes == ["buffers such as BatchNorm's statistics are those of the first worker"]
        assert resumed.extra == {"sent": 7.0}


# --- What can go wrong -------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_something_else_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    model = model_of()
    opt = build("diloco", model.parameters(), SoloLink())
    train(model, opt, 0, 3)
    path = checkpoint.save(tmp_path, model, opt, SoloLink())

    other = build("local-sgd", model.parameters(), SoloLink())
    with pytest.raises(CheckpointError, match="written by DiLoCo, not by LocalSGD"):
        checkpoint.load(path, model, other, SoloLink())

    wider = torch.nn.Linear(9, 9)
    wider_opt = build("diloco", wider.parameters(), SoloLink())
    before = snapshot(wider)
    with pytest.raises(CheckpointError, match="does not exist here"):
        checkpoint.load(path, wider, wider_opt, SoloLink())
    assert_same(before, snapshot(wider))
    assert wider_opt.steps == 0


def test_another_inner_optimizer_is_refused(tmp_path: Path) -> None:
    model = model_of()
    path = checkpoint.save(tmp_path, model, build("diloco", model.parameters(), SoloLink(), inner=sgd), SoloLink())
    with pytest.raises(CheckpointError, match="written with the inner optimizer SGD, not with AdamW"):
        checkpoint.load(path, model, build("diloco", model.parameters(), SoloLink(), inner=adamw), SoloLink())


def test_damaged_files_are_one_clear_error_and_nothing_changes(tmp_path: Path) -> None:
    model = model_of()
    opt = build("diloco", model.parameters(), SoloLink())
    train(model, opt, 0, 2)
    path = checkpoint.save(tmp_path, model, opt, SoloLink())
    train(model, opt, 0, 1, first=3)
    before = snapshot(model)
    for name in ("worker0.0.safetensors", "replicated.0.safetensors", "thinwire.json", "SHA256SUMS"):
        file = path / name
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CheckpointError, match="is damaged"):
            checkpoint.load(path, model, opt, SoloLink())
        file.unlink()
        with pytest.raises(CheckpointError, match=r"is damaged|is not a finished thinwire checkpoint"):
            checkpoint.load(path, model, opt, SoloLink())
        file.write_bytes(whole)
    assert_same(before, snapshot(model))
    assert opt.steps == 3
    assert checkpoint.load(path, model, opt, SoloLink()).step == 2


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    model = torch.nn.Linear(300, 300)
    opt = build("diloco", model.parameters(), SoloLink())
    good = checkpoint.save(tmp_path, model, opt, SoloLink())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    opt.set_counter("thinwire_step", 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # files may not grow beyond this: as on a full disk
    try:
        with pytest.raises(CheckpointError, match=r"could not write the checkpoint of step 1: .*; older ones are untouched"):
            checkpoint.save(tmp_path, model, opt, SoloLink())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoint.finished(tmp_path) == [good]


def test_going_back_gives_up_the_later_ones(tmp_path: Path) -> None:
    model = model_of()
    opt = build("data-parallel", model.parameters(), SoloLink())
    for step in (2, 4, 6):
        train(model, opt, 0, 2, first=step - 1)
        checkpoint.save(tmp_path, model, opt, SoloLink(), keep=9)
    checkpoint.load(checkpoint.finished(tmp_path)[0], model, opt, SoloLink())
    train(model, opt, 0, 1, first=3)
    path = checkpoint.save(tmp_path, model, opt, SoloLink(), keep=9)
    assert path.name == "step-00000003"
    assert [p.name for p in checkpoint.finished(tmp_path)] == ["step-00000002", "step-00000003"]


def _rewritten(path: Path, text: str) -> None:
    """Another description, with the checksum that belongs to it."""
    (path / "thinwire.json").write_text(text)
    sums = read_sums(path) | {"thinwire.json": sum_of(path / "thinwire.json")}
    write_sums(path, sums)


def test_a_description_of_another_format_is_refused(tmp_path: Path) -> None:
    model = model_of()
    opt = build("diloco", model.parameters(), SoloLink())
    path = checkpoint.save(tmp_path, model, opt, SoloLink())
    description = json.loads((path / "thinwire.json").read_text())
    _rewritten(path, json.dumps(description | {"format": 99}))
    with pytest.raises(CheckpointError, match="has format 99, this version reads 2"):
        checkpoint.load(path, model, opt, SoloLink())
    (path / "SHA256SUMS").unlink()
    (path / "thinwire.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(CheckpointError, match="has format 1, which thinwire no longer reads, since it holds a pickle"):
        checkpoint.load(path, model, opt, SoloLink())


def test_a_disk_that_fails_leaves_the_last_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    opt = build("diloco", model.parameters(), SoloLink())
    train(model, opt, 0, 1)
    good = checkpoint.save(tmp_path, model, opt, SoloLink())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("thinwire.checkpoint.api.publish", full)
    train(model, opt, 0, 1, first=2)
    with pytest.raises(CheckpointError, match="No space left on device; older ones are untouched"):
        checkpoint.save(tmp_path, model, opt, SoloLink())
    assert checkpoint.finished(tmp_path) == [good]
    checkpoint.load(good, model, opt, SoloLink())
    assert opt.steps == 1


SAVES_FOR_EVER = """
import sys, torch
from pathlib import Path
from tests.conformance.training import build, model_of, train
from thinwire import SoloLink, checkpoint
torch.set_num_threads(1)
model = model_of()
opt = build("diloco", model.parameters(), SoloLink())
for step in range(1, 10_000):
    train(model, opt, 0, 1, first=step)
    checkpoint.save(Path(sys.argv[1]), model, opt, SoloLink())
    if step == 1:
        print("saving", flush=True)
"""


@pytest.mark.slow  # starts a process; the kill storm of `make test` kills, too
@pytest.mark.parametrize("trial", range(4))
def test_a_kill_at_any_moment_leaves_a_good_checkpoint(trial: int, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SAVES_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE, env=_environment()
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"saving\n"
        time.sleep(random.Random(trial).uniform(0.02, 0.6))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    model = model_of(seed=5)
    opt = build("diloco", model.parameters(), SoloLink())
    newest = checkpoint.finished(tmp_path)[-1]
    step = checkpoint.load(newest, model, opt, SoloLink()).step
    reference = model_of()
    reference_opt = build("diloco", reference.parameters(), SoloLink())
    train(reference, reference_opt, 0, step)
    assert_same(snapshot(model), snapshot(reference))
    checkpoint.save(tmp_path, model, opt, SoloLink())
    assert not list(tmp_path.glob(".writing-*")), "what the kill left is removed by the next save"


def _environment() -> dict[str, str]:
    root = Path(__file__).parents[2]
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])}


def test_reshard_is_harmless_to_ordinary_models() -> None:
    model = model_of()
    before = snapshot(model)
    reshard(model)
    assert_same(before, snapshot(model))


def _folder_is_a_file(link: TorchLink, folder: Path) -> str:
    model = model_of()
    opt = build("diloco", model.parameters(), link)
    try:
        checkpoint.save(folder, model, opt, link)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_problem_of_the_first_process_is_raised_on_all_of_them_at_once(tmp_path: Path, pool: Pool) -> None:
    (tmp_path / "file").write_text("")
    for message in pool.run(_folder_is_a_file, 3, tmp_path / "file" / "checkpoints"):
        assert "could not write the checkpoint of step 0: NotADirectoryError" in message
