"""The page of a report: one HTML file that needs nothing else. All words that come from users are escaped here."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

import thinwire
from thinwire.errors import how_to_install
from thinwire.tools.config import now
from thinwire.tools.report.comparison import Arm, Comparison, scipy_is_here, show_settings
from thinwire.tools.report.drawing import DARK_ARMS, DASHES, LIGHT_ARMS, Drawing
from thinwire.tools.report.figures import colour_numbers
from thinwire.tools.report.svg import inline_svg
from thinwire.tools.report.table import headline, table
from thinwire.tools.summary import counted

_TEXTS = {"method", "settings", "place"}
NO_CURVES = "These records have no curves, so there are no figures over steps and time."
NO_TIMES = "These records have no times, so there is no figure over time."
NO_DRIFT = "At every evaluation all workers held the same model: none drifted."
FOOTER = (
    "Loss: mean over seeds, with their standard deviation. Vs baseline: the mean difference to the baseline of the same seed, "
    "with its standard error. p: paired t-test, two-sided: how likely so large a difference is by the choice of seeds alone. "
    "Fewer: times fewer bytes than fp32 gradients at every step, and the same with 4 or 8 workers. Tried: settings that were "
    "tried before, on one seed. Waiting: the share of the time that a worker spent on the wire. Drift: how far the workers' "
    "models were apart at the end."
)
NO_SCIPY = f"There is no p without scipy: {how_to_install('report')}."
UNFINISHED = "Unfinished runs were interrupted or still go on: they are shown as far as they went, and compared with none."
SIMULATED = "Simulated runs compute what real workers would, but one after another in one process; their seconds are simulated."


def page(sections: Sequence[tuple[Comparison, Sequence[Drawing]]], *, title: str, reload: float | None = None) -> str:
    """The whole file.

    Args:
        sections: each job with its figures.
        title: of the page.
        reload: seconds after which a browser reads it again; None for a page that stays as it is.
    """
    style = _file("page.css").replace("{{light}}", _palette(LIGHT_ARMS)).replace("{{dark}}", _palette(DARK_ARMS))
    script = _file("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()  # nothing else may run here
    runs = sum(len(arm.records) for comparison, _ in sections for arm in comparison.arms)
    parts = {
        "title": escape(title),
        "reload": "" if reload is None else f'<meta http-equiv="refresh" content="{math.ceil(reload)}">',
        "made": f"{counted(runs, 'run')}, {now()[:10]}, thinwire {escape(thinwire.__version__)}",
        "footer": escape(FOOTER if scipy_is_here() else f"{FOOTER} {NO_SCIPY}"),
        "digest": digest,
        "style": style,
        "sections": "\n".join(
            _section(number, comparison, figures, titled=comparison.title != title)
            for number, (comparison, figures) in enumerate(sections)
        ),
        "script": script,
    }
    html = _file("page.html")
    # The template is cut up, not searched and replaced: braces in what users wrote mean nothing.
    head, *rest = html.split("{{")
    return head + "".join(parts[name] + text for name, _, text in (piece.partition("}}") for piece in rest))


def _file(name: str) -> str:
    return resources.files("thinwire.tools.report").joinpath(name).read_text(encoding="utf-8")


def _palette(colours: Iterable[str]) -> str:
    return " ".join(f"--arm-{number}: {colour};" for number, colour in enumerate(colours))


def _section(number: int, comparison: Comparison, figures: Sequence[Drawing], *, titled: bool) -> str:
    common = show_settings(comparison.common)
    verdict = headline(comparison)
    names = {figure.name for figure in figures}
    notes = [NO_CURVES] if "loss-steps" not in names else [NO_TIMES] if "loss-time" not in names else []
    notes += [UNFINISHED] if any(arm.unfinished for arm in comparison.arms) else []
    notes += [SIMULATED] if any(arm.first.place.startswith("simulated") for arm in comparison.arms) else []
    return "\n".join(
        [
            f'<section aria-label="{escape(comparison.title)}">',
            f"<h2>{escape(comparison.title)}</h2>" if titled else "",
            f'<p class="common">All with {escape(common)}.</p>' if common else "",
            f'<p class="headline">{escape(verdict)}</p>' if verdict else "",
            _key(comparison),
            '<div class="figures">',
            *(_figure(figure, prefix=f"s{number}-{figure.name}") for figure in figures),
            _no_drift() if "drift" not in names and _never_drifted(comparison) else "",
            "</div>",
            *(f'<p class="note">{escape(note)}</p>' for note in notes),
            "<h3>In numbers</h3>",
            _table(comparison),
            "<h3>How each came about</h3>",
            *(_about(arm) for arm in comparison.arms),
            "</section>",
        ]
    )


def _never_drifted(comparison: Comparison) -> bool:
    """Whether all arms were evaluated on the way, and no worker's model was apart from the others'."""
    curves = [record.curve for arm in comparison.arms for record in arm.records]
    return all(any(point.val_drift == 0 for point in curve) for curve in curves)


def _key(comparison: Comparison) -> str:
    """The arms by colour; a press hides one."""
    numbers = colour_numbers(comparison)
    items = [
        f'<li><button type="button" aria-pressed="true" data-of="{numbers[arm.name]}">{_swatch(numbers[arm.name])}'
        f"<span>{escape(arm.name)}</span></button></li>"
        for arm in comparison.arms
    ]
    return f'<ul class="key" aria-label="Methods; press one to hide it">{"".join(items)}</ul>'


def _swatch(number: int) -> str:
    dashes = DASHES[number // len(LIGHT_ARMS) % len(DASHES)]
    pattern = "" if isinstance(dashes, str) else f' stroke-dasharray="{" ".join(f"{3 * d:g}" for d in dashes[1])}"'
    line = (
        f'<line x1="0" y1="5" x2="24" y2="5" style="stroke: var(--arm-{number % len(LIGHT_ARMS)})" stroke-width="4"{pattern}/>'
    )
    return f'<svg viewBox="0 0 24 10" aria-hidden="true">{line}</svg>'


def _figure(figure: Drawing, *, prefix: str) -> str:
    panels = [
        (f"<h4>{escape(title)}</h4>" if title else "") + inline_svg(figure, panel=number, prefix=f"{prefix}-{number}")
        for number, (title, _) in enumerate(figure.panels)
    ]
    inside = panels[0] if len(panels) == 1 else "".join(f"<div>{panel}</div>" for panel in panels)
    wide = ' class="wide"' if len(panels) > 1 else ""
    body = inside if len(panels) == 1 else f'<div class="panels">{inside}</div>'
    caption = f"<figcaption>{escape(figure.caption)}</figcaption>"
    return f"<figure{wide} data-figure={figure.name}><h3>{escape(figure.title)}</h3>{body}{caption}</figure>"


def _no_drift() -> str:
    return f'<div class="said"><h3>Drift between workers</h3><p>{escape(NO_DRIFT)}</p></div>'


def _table(comparison: Comparison) -> str:
    columns, rows = table(comparison)
    numbers = colour_numbers(comparison)
    head = "".join(
        f'<th scope="col" aria-sort="none" data-kind="{"text" if name in _TEXTS else "number"}"'
        f"{_text_class(name)}>"
        f'<button type="button">{escape(name)}</button></th>'
        for name in columns
    )
    body = []
    for arm, row in zip(comparison.arms, rows, strict=True):
        cells = []
        for name, cell in zip(columns, row, strict=True):
            tag = 'th scope="row"' if name == "method" else "td"
            value = cell.text if name in _TEXTS else "" if cell.value is None else f"{cell.value:.12g}"
            cells.append(f'<{tag}{_text_class(name)} data-value="{escape(value)}">{escape(cell.text)}</{tag.split()[0]}>')
        base = ' class="baseline"' if arm is comparison.baseline else ""
        body.append(f'<tr{base} data-of="{numbers[arm.name]}">{"".join(cells)}</tr>')
    caption = f"{comparison.title}: press a header to sort"
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _text_class(name: str) -> str:
    return ' class="text"' if name in _TEXTS else ""


def _about(arm: Arm) -> str:
    """How an arm came about: what repeats it, on which machine, when."""
    first = arm.first
    machine = first.versions.get("platform", "")
    dates = sorted({record.date[:10] for record in arm.records if record.date})
    facts = {
        "place": first.place,
        "seeds": ", ".join(str(record.config.seed) for record in arm.records),
        "machine": ", ".join(part for part in (machine, counted(first.cores, "core") if first.cores else "") if part),
        "versions": ", ".join(f"{name} {version}" for name, version in first.versions.items() if name != "platform"),
        "date": " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "",
        "evaluated": str(first.figures.get("evaluated", "")),
    }
    listed = "".join(f"<dt>{name}</dt><dd>{escape(fact)}</dd>" for name, fact in facts.items() if fact)
    command = f"<pre>{escape(first.command)}</pre>" if first.command else ""
    return f"<details><summary>{escape(arm.name)}</summary>{command}<dl>{listed}</dl></details>"
