"""Ordinary torch optimizers with momenta at several time scales: the inner optimizers of MT-DAO, and its baselines."""

from thinwire.maths.propose import BetaProposal, propose_beta
from thinwire.optim.low_rank_adam import LowRankAdam
from thinwire.optim.mixture import Mixture, MomentumSwitch
from thinwire.optim.quasi_hyperbolic import QHADOPT, QHM, QHAdam, QHMuon, QuasiHyperbolic, Settings

__all__ = [
    "QHADOPT",
    "QHM",
    "BetaProposal",
    "LowRankAdam",
    "Mixture",
    "MomentumSwitch",
    "QHAdam",
    "QHMuon",
    "QuasiHyperbolic",
    "Settings",
    "propose_beta",
]
