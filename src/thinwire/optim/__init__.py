"""Ordinary torch optimizers with momenta at several time scales: the inner optimizers of MT-DAO, and its honest baselines."""

from thinwire.optim.low_rank_adam import LowRankAdam
from thinwire.optim.propose import BetaProposal, propose_beta
from thinwire.optim.quasi_hyperbolic import QHADOPT, QHM, Common, QHAdam, QHMuon, QuasiHyperbolic

__all__ = ["QHADOPT", "QHM", "BetaProposal", "Common", "LowRankAdam", "QHAdam", "QHMuon", "QuasiHyperbolic", "propose_beta"]
