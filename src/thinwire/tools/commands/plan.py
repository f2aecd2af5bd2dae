"""`thinwire plan`: what each method would cost on a link, and which one to take. Nothing is trained."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from thinwire.errors import ConfigError, check_whole_number
from thinwire.network import Network, parse_bandwidth, parse_duration, show_bandwidth, show_bytes, show_seconds
from thinwire.tools.advice import Advice, Offer, Wishes, advise
from thinwire.tools.build import task_of
from thinwire.tools.command_flags import PlanFlags
from thinwire.tools.config import RunConfig, write_whole
from thinwire.tools.flags import parse_flags, with_json_name
from thinwire.tools.plan import Cluster, gpt_like, on_meta, parse_count
from thinwire.tools.tables import network_of


def main(arguments: list[str]) -> int:
    """Print the table and the recommendation."""
    flags = parse_flags(PlanFlags, "plan", with_json_name(arguments))
    if not 0 < flags.utilisation < 1:
        raise ConfigError(f"utilisation must be above 0 and below 1, got {flags.utilisation!r}")
    cluster = _cluster(flags)
    title, model = _model(flags)
    advice = advise(model, cluster, utilisation=flags.utilisation, wishes=Wishes(flags.H, flags.k, flags.tau, flags.route))
    if flags.json is not None:
        text = json.dumps(_as_json(flags, model, cluster, advice), indent=1)
        if flags.json == "-":
            print(text)
            return 0
        write_whole(Path(flags.json), text + "\n")
    _show(title, flags, cluster, advice)
    return 0


def _cluster(flags: PlanFlags) -> Cluster:
    if flags.bandwidth is None and flags.links is None:
        raise ConfigError("--bandwidth is missing: that of each worker's link, such as 200mbit; thinwire doctor measures it")
    if flags.step_time is None:
        raise ConfigError(
            "--step-time is missing: the time of one training step without any exchange, such as 0.9s. Take it from your own "
            'loop, or for a built-in task divide "seconds" by "step" in the summary.json of: thinwire train --algorithm alone '
            f"--task {flags.task or 'gpt-small'} --steps 50"
        )
    sites = flags.workers if flags.sites is None else flags.sites
    check_whole_number("sites", sites)
    if flags.workers % sites:
        raise ConfigError(f"{flags.workers} workers do not divide into {sites} sites of equal size")
    if flags.sites is None and flags.inside != "inf":
        raise ConfigError(f"--inside {flags.inside} needs --sites: how many sites the workers are grouped into")
    return Cluster(
        workers=sites,
        members=flags.workers // sites,
        inside=Network(bandwidth=parse_bandwidth(flags.inside)),
        network=network_of(flags.bandwidth or "inf", flags.down, flags.latency, flags.links, sites),
        step_time=parse_duration(flags.step_time),
        goodput=flags.framing,
        codec_time=parse_duration(flags.codec_time),
        backward=flags.backward,
    )


def _model(flags: PlanFlags) -> tuple[str, nn.Module]:
    """What the model is called, and its shapes."""
    if (flags.params is None) == (flags.task is None):
        raise ConfigError(f"give --params such as 1.3b, or --task, got params={flags.params!r} and task={flags.task!r}")
    if flags.params is not None:
        return f"{flags.params} parameters", gpt_like(parse_count(flags.params))
    assert flags.task is not None
    return flags.task, on_meta(task_of(RunConfig(task=flags.task), flags.workers).model())


# --- What is shown -----------------------------------------------------------------------------------------------------------


def _show(title: str, flags: PlanFlags, cluster: Cluster, advice: Advice) -> None:
    console = Console()
    target = f"{100 * flags.utilisation:g}%"
    console.print(
        f"{title} on {flags.workers} workers{_sites(flags)}, {_wire(flags)}, {flags.step_time} a step",
        highlight=False,
    )
    table = Table("method", box=None, pad_edge=False)
    for column in ("sent/step", "fewer", "wait/step", "computes", f"for {target}", "loss"):
        table.add_column(column, justify="right", no_wrap=True)
    dense = advice.offers[0].cost.bytes_per_step
    for offer in advice.offers:
        table.add_row(f"{offer.listed} ^" if offer.by_owners else offer.listed, *_figures(offer, dense))
    console.print(table)
    console.print(f"\n{_notes(target, cluster, advice)}\n", highlight=False, style="dim")
    console.print(advice.sentence, highlight=False, style="bold")


def _sites(flags: PlanFlags) -> str:
    return "" if flags.sites is None else f" in {flags.sites} sites ({flags.inside} inside)"


def _wire(flags: PlanFlags) -> str:
    return f"links of {flags.links}" if flags.links is not None else f"{flags.bandwidth} and {flags.latency} a message"


def _figures(offer: Offer, dense: float) -> list[str]:
    cost = offer.cost
    return [
        show_bytes(cost.bytes_per_step),
        _times(dense / cost.bytes_per_step) if cost.bytes_per_step else "-",
        show_seconds(cost.wait_per_step),
        f"{100 * cost.utilisation:.1f}%",
        _needed(offer),
        "?" if offer.loss is None else str(offer.loss),
    ]


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 99.5 else f"{ratio:.3g}x"


def _needed(offer: Offer) -> str:
    if offer.needed is None:
        return "never"
    if offer.knob == "bandwidth":
        return show_bandwidth(offer.needed)
    return f"{offer.knob}={offer.needed:.0f}"


def _notes(target: str, cluster: Cluster, advice: Advice) -> str:
    latency = ", ".join(offer.name for offer in advice.offers if offer.never == "latency")
    too_long = ", ".join(offer.name for offer in advice.offers if offer.never == "bytes")
    never = f"; never of {latency}: the latency alone is too much" if latency else ""
    never += f"; never of {too_long}: even the least of it has too many bytes" if too_long else ""
    owners = any(offer.by_owners for offer in advice.offers)
    route = ' ^ averaged by owners: --route owners, or route="owners" in Python.' if owners else ""
    packing = "" if cluster.codec_time else "; packing messages is not counted (--codec-time)"
    return (
        f"sent: bytes per worker. for {target}: the H, k or bandwidth with which workers compute {target} of the time{never}. "
        f"{100 * cluster.goodput:.1f}% of the bandwidth is left by headers (--framing){packing}. "
        "loss: against AdamW-DDP in small runs from scratch with a decay (docs/results.md), for the order; ? was not measured, "
        f"> beyond what was.{route}"
    )


def _as_json(flags: PlanFlags, model: nn.Module, cluster: Cluster, advice: Advice) -> dict[str, Any]:
    return {
        "params": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "task": flags.task,
        **{k: v for k, v in asdict(cluster).items() if k not in ("network", "inside")},
        "workers": flags.workers,
        "sites": flags.sites,
        "inside": None if flags.inside == "inf" else parse_bandwidth(flags.inside),
        **{k: v for k, v in asdict(cluster.network).items() if v is not None},
        "target": flags.utilisation,
        "methods": [_offer_as_json(offer) for offer in advice.offers],
        "recommended": None if advice.best is None else _offer_as_json(advice.best),
        "recommendation": advice.sentence,
    }


def _offer_as_json(offer: Offer) -> dict[str, Any]:
    return {
        "name": offer.listed,
        "algorithm": offer.config.algorithm,
        "settings": offer.config.settings,
        "wire": offer.config.wire,
        "route": "owners" if offer.by_owners else "gather",
        **asdict(offer.cost),
        "needed": {offer.knob: offer.needed},
        "never": offer.never,
        "loss_percent": None if offer.loss is None else offer.loss.percent,
        "loss_is_a_lower_bound": offer.loss is not None and offer.loss.at_least,
    }
