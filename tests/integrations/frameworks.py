"""What the tests of all adapters need: real frameworks, a job for them, and a count of the collectives that are not ours."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from thinwire.links import Link

NAMES = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "isend",
    "irecv",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip a module where one of these is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    reason = f"{', '.join(missing)} not installed: make test-full installs it"
    return pytest.mark.skipif(bool(missing), reason=reason)


def join(link: Link) -> None:
    """Let frameworks find the job that this process is in; what they themselves warn of is not our matter."""
    os.environ["LOCAL_RANK"] = str(link.rank)
    warnings.simplefilter("ignore")


@contextmanager
def foreign_collectives() -> Iterator[Counter[str]]:
    """Within it, every call of a collective of torch.distributed that does not come from thinwire is counted by its name."""
    counts: Counter[str] = Counter()

    def counted(name: str, original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            frame, ours = sys._getframe(1), False
            while frame is not None and not ours:
                ours = "/thinwire/links/" in frame.f_code.co_filename
                frame = frame.f_back
            if not ours:
                counts[name] += 1
            return original(*args, **options)

        return call

    before = {name: getattr(dist, name) for name in NAMES}
    for name, original in before.items():
        setattr(dist, name, counted(name, original))
    try:
        yield counts
    finally:
        for name, original in before.items():
            setattr(dist, name, original)
