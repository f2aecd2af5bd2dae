"""The simulator: many workers in one process, deterministic, with a network model and a virtual clock."""

from thinwire.network import Network
from thinwire.sim.churn import Churn
from thinwire.sim.world import World

__all__ = ["Churn", "Network", "World"]
