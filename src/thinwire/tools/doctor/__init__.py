"""What `thinwire doctor` looks at: this machine, the links between the ranks of a job, and what a device is asked to do."""

from thinwire.tools.doctor.links import (
    Measurements,
    Swap,
    look_at_links,
    measure,
    plan_command,
    tell_each_other,
    tournament,
)
from thinwire.tools.doctor.machine import PARTS, Finding, Machine, inspect_machine, look_at_all, look_at_machine, machine_of

__all__ = [
    "PARTS",
    "Finding",
    "Machine",
    "Measurements",
    "Swap",
    "inspect_machine",
    "look_at_all",
    "look_at_links",
    "look_at_machine",
    "machine_of",
    "measure",
    "plan_command",
    "tell_each_other",
    "tournament",
]
