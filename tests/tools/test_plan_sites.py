"""The plan of sites and of owners: what the simulator takes, and what a real wire adds."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from thinwire import Link
from thinwire.errors import ConfigError
from thinwire.network import Network
from thinwire.sim import World
from thinwire.tools.build import optimizer_of
from thinwire.tools.commands.plan import main
from thinwire.tools.config import RunConfig
from thinwire.tools.plan import Cluster, predict

NETWORK = Network(bandwidth=8e6, latency=0.002)
STEP, LAP = 0.05, 4
ONE_K = "DCT(64) >> TopK(128) >> Sign()"
LINK = ["--bandwidth", "100mbit", "--latency", "5ms", "--step-time", "0.2s", "--params", "1m"]


def cluster(workers: int, network: Network = NETWORK, **more) -> Cluster:
    return Cluster(workers=workers, network=network, step_time=STEP, **({"goodput": 1.0, "control": 0} | more))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 200), nn.Linear(200, 64, bias=False))


def seconds_per_step(world: World, config: RunConfig) -> float:
    """On the simulator's clock, without the handshake of the first step."""

    def worker(link: Link) -> float:
        made = model()
        opt, begun = optimizer_of(config, made, link), 0.0
        for step in range(2 * LAP):
            for nth, p in enumerate(made.parameters()):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * link.data_rank + 10 * nth + step))
            begun = link.now() if step == LAP else begun
            opt.step()
        return (link.now() - begun) / LAP

    return world.run(worker)[0]


def test_what_owners_take_is_set_by_whoever_sends_or_gets_most() -> None:
    """Of more workers than blocks: some own nothing, and one that owns a block gets it from all others."""
    config = RunConfig(algorithm="demo", wire=ONE_K, route="owners", settings={"alarm_every": 0})
    world = World(16, network=NETWORK, step_time=STEP)
    assert seconds_per_step(world, config) == pytest.approx(predict(config, model(), cluster(16)).seconds_per_step)


@pytest.mark.parametrize(("algorithm", "settings"), [("demo", {}), ("diloco", {"H": 2}), ("data-parallel", {})])
def test_sites_cost_what_so_many_workers_cost_and_what_is_exchanged_inside(algorithm: str, settings: dict[str, int]) -> None:
    inside = Network(bandwidth=1e8)
    wire = ONE_K if algorithm == "demo" else None
    config = RunConfig(algorithm=algorithm, wire=wire, settings={"alarm_every": 0, **settings})
    world = World(4, sites=2, network=NETWORK, inside=inside, step_time=STEP)
    planned, alone = (predict(config, model(), cluster(2, **more)) for more in ({"members": 2, "inside": inside}, {}))
    assert seconds_per_step(world, config) == pytest.approx(planned.seconds_per_step, rel=1e-3), "but for flags of a byte"
    assert planned.seconds_per_step > 1.02 * alone.seconds_per_step
    assert planned.bytes_per_step == alone.bytes_per_step


def test_torch_ddp_knows_no_sites() -> None:
    ddp = RunConfig(algorithm="ddp")
    assert predict(ddp, model(), cluster(2, members=3, inside=Network(bandwidth=1e9))) == predict(ddp, model(), cluster(6))
    uneven = cluster(2, Network(bandwidth=(1e6, 2e6), down=(3e6, 4e6), latency=0.01), members=2)
    assert uneven.without_sites().network == Network((1e6, 1e6, 2e6, 2e6), 0.01, (3e6, 3e6, 4e6, 4e6))


def test_a_part_costs_more_than_its_bytes_on_a_real_wire() -> None:
    config, wire = RunConfig(algorithm="demo", wire=ONE_K, route="owners"), Network(bandwidth=8e6)
    plain, real = (predict(config, model(), cluster(4, wire, control=n)) for n in (0, 500))
    assert real.seconds_per_step - plain.seconds_per_step == pytest.approx(3 * 3 * 500 * 8 / 8e6), "3 exchanges with 3 others"
    assert real.bytes_per_step == plain.bytes_per_step


def test_sites_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LINK, "--workers", "64", "--sites", "8", "--inside", "10gbit", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["workers"], told["sites"], told["members"], told["inside"]) == (64, 8, 8, 1e10)
    rows = {row["name"]: row for row in told["methods"]}
    assert main([*LINK, "--workers", "8", "--json"]) == 0
    eight = {row["name"]: row for row in json.loads(capsys.readouterr().out)["methods"]}
    assert rows["diloco H=32"]["bytes_per_step"] == eight["diloco H=32"]["bytes_per_step"]
    assert rows["ddp"]["bytes_per_step"] > eight["ddp"]["bytes_per_step"], "a ring of 64"
    assert main([*LINK, "--workers", "64", "--sites", "8", "--inside", "10gbit"]) == 0
    assert "64 workers in 8 sites (10gbit inside)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--workers", "6", "--sites", "4"], "6 workers do not divide into 4 sites"),
        (["--sites", "0"], "sites must be a whole number of at least 1, got 0"),
        (["--inside", "1gbit"], "--inside 1gbit needs --sites"),
    ],
)
def test_sites_that_cannot_be(flags: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        main([*LINK, *flags])
