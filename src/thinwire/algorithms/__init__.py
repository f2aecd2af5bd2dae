"""The methods, one file each. A file dropped in here is found by the command line and by the conformance suite."""

from __future__ import annotations

import importlib
import pkgutil

from thinwire.algorithms.data_parallel import DataParallel
from thinwire.algorithms.decoupled_diloco import DecoupledDiLoCo
from thinwire.algorithms.demo import DeMo
from thinwire.algorithms.diloco import DiLoCo
from thinwire.algorithms.local_sgd import LocalSGD
from thinwire.algorithms.lordo import LoRDO
from thinwire.algorithms.mt_dao import MTDAO
from thinwire.algorithms.noloco import NoLoCo
from thinwire.algorithms.streaming_diloco import StreamingDiLoCo
from thinwire.core.optimizer import Algorithm

__all__ = [
    "MTDAO",
    "DataParallel",
    "DeMo",
    "DecoupledDiLoCo",
    "DiLoCo",
    "LoRDO",
    "LocalSGD",
    "NoLoCo",
    "StreamingDiLoCo",
    "found",
]


def found() -> dict[str, type[Algorithm]]:
    """Every algorithm class of this package by its name on the command line."""
    classes: dict[str, type[Algorithm]] = {}
    for module in pkgutil.iter_modules(__path__):
        contents = vars(importlib.import_module(f"{__name__}.{module.name}"))
        for cls in contents.values():
            if isinstance(cls, type) and issubclass(cls, Algorithm) and cls.__module__ == f"{__name__}.{module.name}":
                classes[cls.name] = cls
    return dict(sorted(classes.items()))
