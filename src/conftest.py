"""The doctests of an adapter are collected where its framework is installed, and only there."""

from importlib.util import find_spec
from pathlib import Path

HELPERS = {"__init__", "optional", "state"}
ADAPTERS = [path for path in Path(__file__).parent.glob("thinwire/integrations/*.py") if path.stem not in HELPERS]

collect_ignore = [str(path) for path in ADAPTERS if find_spec(path.stem) is None]
if find_spec("triton") is None:
    collect_ignore.append(str(Path(__file__).parent / "thinwire" / "kernels" / "triton"))
