"""`thinwire report`: one self-contained page, PNGs beside it, and a table in the terminal, from the records of any runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.network import parse_bandwidth, parse_duration
from thinwire.tools.command_flags import SPEEDS
from thinwire.tools.config import write_whole
from thinwire.tools.report.comparison import Comparison


def write_report(
    comparisons: Sequence[Comparison],
    out: Path,
    *,
    title: str | None = None,
    bandwidths: Sequence[str] = SPEEDS,
    latency: str = "0ms",
    reload: float | None = None,
) -> Path:
    """Write the page to `out` and its figures as PNG into a folder beside it, whose path is returned.

    Args:
        comparisons: what to show, each as a section.
        out: the HTML file.
        title: of the page; by default that of the only comparison.
        bandwidths: links of the figure of loss against time, in words.
        latency: of one message there, in words.
        reload: seconds after which a browser reads the page again, while runs go on.

    Raises:
        MissingDependency: matplotlib is not installed.
        ConfigError: the file cannot be written.
    """
    from thinwire.tools.report.drawing import save_png
    from thinwire.tools.report.figures import colour_numbers, drawings
    from thinwire.tools.report.page import page

    speeds = [(text, parse_bandwidth(text)) for text in bandwidths]
    delay = (latency, parse_duration(latency))
    title = title or (comparisons[0].title if len(comparisons) == 1 else "Runs compared")
    sections = [(comparison, drawings(comparison, speeds=speeds, latency=delay)) for comparison in comparisons]
    folder = out.with_name(f"{out.stem}-figures")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, (comparison, figures) in enumerate(sections, 1):
            names = list(colour_numbers(comparison))
            for figure in figures:
                name = figure.name if len(sections) == 1 else f"{number}-{figure.name}"
                save_png(figure, folder / f"{name}.png", names=names)
        write_whole(out, page(sections, title=title, reload=reload))
    except OSError as cause:
        raise ConfigError(f"cannot write the report {out}: {cause.strerror or cause}") from cause
    return folder
