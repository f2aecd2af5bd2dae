"""SVG as matplotlib writes it, made fit to stand in a page: the page's colours and font, and no id that another figure has."""

from __future__ import annotations

import re
from io import BytesIO
from xml.etree import ElementTree as Tree

from thinwire.tools.report.drawing import NAMED, Drawing, save_svg

_COLOURS = {NAMED.ink: "var(--ink)", NAMED.faint: "var(--faint)", NAMED.grid: "var(--grid)"}
_COLOURS |= {colour: f"var(--arm-{number})" for number, colour in enumerate(NAMED.arms)}
_HREF = "{http://www.w3.org/1999/xlink}href"
_NOT_FOR_A_PAGE = {"metadata", "style"}  # a style in one figure would rule the whole page


def inline_svg(drawing: Drawing, *, panel: int, prefix: str) -> str:
    """One panel of a drawing as an <svg> element.

    Args:
        drawing: what to draw.
        panel: which part of it.
        prefix: of all its ids; no other figure on the page may have it.
    """
    file = BytesIO()
    save_svg(drawing, file, panel=panel)
    return themed(file.getvalue(), prefix=prefix, says=f"{drawing.says} {drawing.panels[panel][0]}".strip())


def themed(svg: bytes, *, prefix: str, says: str) -> str:
    """The <svg> element of a file of matplotlib's, with names for colours and ids of its own.

    Args:
        svg: the file.
        prefix: of all ids.
        says: what the figure shows.
    """
    root = Tree.fromstring(svg)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.text, element.tail = (element.text or "").strip(), ""
    for parent in root.iter():
        for child in [child for child in parent if child.tag in _NOT_FOR_A_PAGE]:
            parent.remove(child)
    for element in root.iter():
        _adapt(element.attrib, prefix)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": says}
    return Tree.tostring(root, encoding="unicode")


def _adapt(attributes: dict[str, str], prefix: str) -> None:
    if arm := re.match(r"arm-(\d+)", attributes.get("id", "")):  # many elements are of one arm: no id, then
        del attributes["id"]
        attributes |= {"class": "arm", "data-arm": arm[1]}
    if "id" in attributes:
        attributes["id"] = f"{prefix}-{attributes['id']}"
    if _HREF in attributes:
        attributes["href"] = f"#{prefix}-{attributes.pop(_HREF).removeprefix('#')}"
    if "clip-path" in attributes:
        attributes["clip-path"] = attributes["clip-path"].replace("url(#", f"url(#{prefix}-")
    for name in {"d", "x", "y", "transform"} & attributes.keys():
        attributes[name] = re.sub(r"(\.\d\d)\d+", r"\1", " ".join(attributes[name].split()))  # a hundredth of a point will do
    style = re.sub(r"font-family: [^;]*", "font-family: inherit", attributes.get("style", ""))
    style = re.sub(r"#[0-9a-f]{6}", lambda colour: _COLOURS.get(colour[0], colour[0]), style)
    if style:
        attributes["style"] = style
