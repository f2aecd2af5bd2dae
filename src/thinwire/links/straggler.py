"""Straggler: makes one worker slow, on a real link by sleeping, on a simulated one by moving its clock."""

from __future__ import annotations

from thinwire.errors import ConfigError
from thinwire.links.base import Link, LinkDecorator


class Straggler(LinkDecorator):
    """Adds `delay` seconds to every local step of this worker.

    Args:
        link: the link to wrap; wrap it on the slow workers only, or everywhere with delay 0 on the others.
        delay: seconds per local step.
    """

    def __init__(self, link: Link, delay: float):
        """Wrap `link`."""
        if not delay >= 0:
            raise ConfigError(f"delay must be zero or more seconds, got {delay!r}")
        super().__init__(link)
        self.delay = delay

    def tick(self) -> None:
        """A local step was taken: be late by `delay`."""
        self.link.tick()
        self.link.elapse(self.delay)
