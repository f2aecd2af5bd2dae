"""NoLoCo: H local steps, then each worker exchanges with one other, drawn in every round. There is no all-reduce.

"NoLoCo: No-all-reduce Low Communication Training Method for Large Models", arXiv 2506.10911:

    every step, every worker i:   x_i   <- InnerOpt(x_i, g_i)                  its state never leaves the worker
    every H steps, in pairs:      m_i   <- mu m_i + eta mean(x - phi)          phi = the last outer point, each worker's own
                                           + gamma (mean(phi) - phi_i)         "mean" is over the two of the pair
                                  phi_i <- phi_i + m_i;   x_i <- phi_i

The last term draws the two points together; nothing else does. With k = gamma / eta both terms are

    eta (mean(s) - k phi_i)   where   s = x + (k - 1) phi

and take one value per parameter on the wire, not two. In the authors' code gamma is eta, and then s is just x.

Two workers that start alike stay alike: they are DiLoCo with heavy-ball momentum. More of them are never equal again.

With P parameters and b bytes per value a round's message is N = 88 + b P bytes, whatever the number of workers: 56 for
the envelope and 32 for the header of its part. Each worker sends one and receives one every H steps, in one hop. Memory: two
slots beside the inner optimizer's state.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Unpack

import numpy as np
from torch.optim import Optimizer

from thinwire.codecs import Codec, Dense
from thinwire.codecs.base import check_codec
from thinwire.codecs.shared_seed import numbers
from thinwire.core.optimizer import PolicyOptions, Start
from thinwire.core.outgoing import Arrived, Outgoing
from thinwire.core.wrapper import Wrapper, narrow_dense
from thinwire.errors import ConfigError, check_not_negative
from thinwire.links.base import Link, pair_of
from thinwire.schedules import Schedule

_PAIRS = 4  # purpose of the shared random numbers


class NoLoCo(Wrapper):
    """H local steps of any optimizer, then an outer step with one other worker, drawn at random.

    Example:
        >>> import torch, thinwire
        >>> model = torch.nn.Linear(4, 2)
        >>> inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> opt = thinwire.NoLoCo(inner, thinwire.connect(), H=32)

    Args:
        inner: any torch optimizer (Adam in the paper); its state stays on the worker.
        link: this worker's end of the wire.
        H: local steps per round, or a `Schedule`; 100 in the authors' configs.
        outer_lr: eta; 0.7 in the authors' configs.
        outer_momentum: mu; 0.3 in the authors' configs.
        gamma: how strongly the two of a pair are drawn together; by default eta, as in the authors' code.
        codec: dense, in any dtype; by default float32, or the parameters' own dtype where that is exact: 16 bits and no gamma.
        options: see `thinwire.Policy`.
    """

    name = "noloco"
    in_pairs = True

    def __init__(
        self,
        inner: Optimizer,
        link: Link,
        *,
        H: int | Schedule = 32,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.3,
        gamma: float | None = None,
        codec: Codec | None = None,
        **options: Unpack[PolicyOptions],
    ):
        """Wrap `inner`."""
        if not 0 < outer_lr < math.inf:
            raise ConfigError(f"outer_lr must be above zero and finite, got {outer_lr!r}")
        if not 0 <= outer_momentum < 1:
            raise ConfigError(f"outer_momentum must be in [0, 1), got {outer_momentum!r}")
        gamma = outer_lr if gamma is None else gamma
        check_not_negative("gamma", gamma)
        if codec is None and gamma == outer_lr and isinstance(inner, Optimizer):
            codec = narrow_dense(inner)  # s is x itself
        codec = Dense() if codec is None else check_codec(codec)
        if not isinstance(codec, Dense):
            raise ConfigError(
                f"NoLoCo sends parameters themselves, of which nothing can be left out: use a dense codec, not {codec!r}"
            )
        codec = replace(codec, gather=True)  # between two workers nothing is added up on the wire
        settings = {"H": H, "outer_lr": outer_lr, "outer_momentum": outer_momentum, "gamma": gamma}
        slots: dict[str, Start] = {"anchor": "param", "momentum": "zeros"}
        super().__init__(inner, link, H=H, codec=codec, slots=slots, settings=settings, **options)
        self.outer_lr, self.outer_momentum, self.gamma = outer_lr, outer_momentum, gamma

    @property
    def evaluated(self) -> str:
        """Which model `shared_model` shows, in words."""
        return "worker 0's own outer point: workers that meet in pairs have no model in common"

    def send(self) -> Outgoing:
        """To the partner of this round: s = x + (k - 1) phi."""
        k, peers = self.gamma / self.outer_lr, self.peers
        s = [x_ + (k - 1) * phi_ for x_, phi_ in zip(self.params(), self.slot("anchor"), strict=True)]
        return self.outgoing(s, pair=pair_of(peers.rank, partner_of(peers.rank, peers.size, self.engine.current.number)))

    def apply(self, arrived: Arrived) -> None:
        """The outer step of this worker and its partner."""
        x, phi, m = self.params(), self.slot("anchor"), self.slot("momentum")
        mu, eta, k = self.outer_momentum, self.outer_lr, self.gamma / self.outer_lr
        s, mine, theirs = arrived.outgoing.tensors, arrived.mine, arrived.theirs
        for x_, phi_, m_, s_, a, b in zip(x, phi, m, s, mine, theirs, strict=True):
            mean = (a + b) / 2 + (s_ - a)  # what the wire has rounded off my own is not lost: the pair's mean moves exactly
            m_.mul_(mu).add_(mean - k * phi_, alpha=eta)  # mu m + eta mean(x - phi) + gamma (mean(phi) - phi)
            phi_.add_(m_)
            x_.copy_(phi_)


def partner_of(rank: int, workers: int, round: int) -> int | None:
    """The partner of worker `rank` in a round: its neighbour in a random order of all workers, the same on each of them.

    Args:
        rank: which worker.
        workers: how many there are; of an odd number, the last in the order has no partner.
        round: the seed.
    """
    order = np.argsort(numbers(0, round, _PAIRS, workers), kind="stable").tolist()
    place = order.index(rank) ^ 1  # 0 and 1 meet, 2 and 3, ...
    return order[place] if place < workers else None
