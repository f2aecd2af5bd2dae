"""thinwire: train one PyTorch model on many workers joined by thin wires.

Names are imported when they are first used, so that the command line can answer `--help` without waiting for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "Algorithm": "thinwire.core.optimizer",
    "Policy": "thinwire.core.policy",
    "Owners": "thinwire.core.route",
    "Wrapper": "thinwire.core.wrapper",
    "DataParallel": "thinwire.algorithms",
    "DeMo": "thinwire.algorithms",
    "DecoupledDiLoCo": "thinwire.algorithms",
    "DiLoCo": "thinwire.algorithms",
    "LoRDO": "thinwire.algorithms",
    "LocalSGD": "thinwire.algorithms",
    "MTDAO": "thinwire.algorithms",
    "NoLoCo": "thinwire.algorithms",
    "StreamingDiLoCo": "thinwire.algorithms",
    "All": "thinwire.codecs",
    "Chain": "thinwire.codecs",
    "Codec": "thinwire.codecs",
    "CodecSchedule": "thinwire.codecs",
    "DCT": "thinwire.codecs",
    "Dense": "thinwire.codecs",
    "Float": "thinwire.codecs",
    "Fp4": "thinwire.codecs",
    "Hadamard": "thinwire.codecs",
    "Identity": "thinwire.codecs",
    "Int8": "thinwire.codecs",
    "Mean": "thinwire.codecs",
    "Parts": "thinwire.codecs",
    "RandomK": "thinwire.codecs",
    "RandomOrthogonal": "thinwire.codecs",
    "Sign": "thinwire.codecs",
    "Striding": "thinwire.codecs",
    "Ternary": "thinwire.codecs",
    "TopK": "thinwire.codecs",
    "TwoBit": "thinwire.codecs",
    "parse_codec": "thinwire.codecs",
    "average": "thinwire.core.average",
    "broadcast": "thinwire.core.replicas",
    "running_statistics": "thinwire.core.buffers",
    "Arrived": "thinwire.core.outgoing",
    "Outgoing": "thinwire.core.outgoing",
    "post": "thinwire.core.exchange",
    "share": "thinwire.core.average",
    "swap": "thinwire.core.average",
    "BlockSampler": "thinwire.core.blocks",
    "block_stream": "thinwire.core.blocks",
    "ElasticLink": "thinwire.links",
    "Peers": "thinwire.links",
    "Flaky": "thinwire.links",
    "Link": "thinwire.links",
    "Metered": "thinwire.links",
    "SoloLink": "thinwire.links",
    "Straggler": "thinwire.links",
    "Throttled": "thinwire.links",
    "TorchLink": "thinwire.links",
    "TwoLevel": "thinwire.links",
    "connect": "thinwire.links",
    "disconnect": "thinwire.links",
    "join": "thinwire.links.join",
    "wsd": "thinwire.lr_schedules",
    "Network": "thinwire.network",
    "Payload": "thinwire.payload",
    "Every": "thinwire.schedules",
    "Periods": "thinwire.schedules",
    "Stages": "thinwire.schedules",
    "Staggered": "thinwire.schedules",
    "Union": "thinwire.schedules",
    "Warmup": "thinwire.schedules",
    "Churn": "thinwire.sim",
    "World": "thinwire.sim",
    "WarmStart": "thinwire.warm_start",
    "auto": "thinwire.tools.auto",
}

__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from thinwire import checkpoint, errors, log, optim
    from thinwire.algorithms import MTDAO, DataParallel, DecoupledDiLoCo, DeMo, DiLoCo, LocalSGD, LoRDO, NoLoCo, StreamingDiLoCo
    from thinwire.codecs import (
        DCT,
        All,
        Chain,
        Codec,
        CodecSchedule,
        Dense,
        Float,
        Fp4,
        Hadamard,
        Identity,
        Int8,
        Mean,
        Parts,
        RandomK,
        RandomOrthogonal,
        Sign,
        Striding,
        Ternary,
        TopK,
        TwoBit,
        parse_codec,
    )
    from thinwire.core.average import average, share, swap
    from thinwire.core.blocks import BlockSampler, block_stream
    from thinwire.core.buffers import running_statistics
    from thinwire.core.exchange import post
    from thinwire.core.optimizer import Algorithm
    from thinwire.core.outgoing import Arrived, Outgoing
    from thinwire.core.policy import Policy
    from thinwire.core.replicas import broadcast
    from thinwire.core.route import Owners
    from thinwire.core.wrapper import Wrapper
    from thinwire.links import (
        ElasticLink,
        Flaky,
        Link,
        Metered,
        Peers,
        SoloLink,
        Straggler,
        Throttled,
        TorchLink,
        TwoLevel,
        connect,
        disconnect,
    )
    from thinwire.links.join import join
    from thinwire.lr_schedules import wsd
    from thinwire.network import Network
    from thinwire.payload import Payload
    from thinwire.schedules import Every, Periods, Stages, Staggered, Union, Warmup
    from thinwire.sim import Churn, World
    from thinwire.tools.auto import auto
    from thinwire.warm_start import WarmStart


def __getattr__(name: str) -> object:
    """Import a public name on its first use."""
    if name in ("checkpoint", "errors", "log", "optim"):
        return importlib.import_module(f"thinwire.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
