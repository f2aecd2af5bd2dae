"""Models without memory: what a codec makes of a model depends on its shapes, not on its values."""

from __future__ import annotations

import copy
import math
import re

import torch
from torch import nn

from thinwire.errors import ConfigError, check_whole_number
from thinwire.tasks.gpt import GPT, GPTConfig


def on_meta(model: nn.Module) -> nn.Module:
    """The model itself where it takes no memory, else a copy of its shapes."""
    if all(p.is_meta for p in model.parameters()):
        return model
    return copy.deepcopy(model).to("meta")


def parse_count(text: str) -> int:
    """A number of parameters from "1.3b", "124m", "820k" or a plain number.

    >>> parse_count("1.3b")
    1300000000
    """
    match = re.fullmatch(r"([0-9][0-9_,]*(?:\.[0-9]+)?)([kmbt]?)", text.strip().lower())
    if match is None:
        raise ConfigError(f"params must look like 1.3b, 124m or 3_200_000, got {text!r}")
    power = {"": 0, "k": 3, "m": 6, "b": 9, "t": 12}[match[2]]
    return round(float(match[1].replace("_", "").replace(",", "")) * 10**power)


def gpt_like(params: int) -> nn.Module:
    """A GPT of so many parameters, without memory: what a codec makes of a model depends on its shapes.

    Depth and width are those with a usual ratio; the rows of the embedding make up the rest, to less than one row.

    Args:
        params: how many, at least a thousand.
    """
    check_whole_number("params", params, least=1000)
    usual = 50_257 if params >= 50_000_000 else 256  # GPT-2's vocabulary, or bytes
    multiple = 64 if params >= 1_000_000 else 2
    fitting = {(1, 2): params // 2 - 27}  # rows of the embedding by (layers, width)
    for L in range(1, 129):
        for w in range(-(-32 * L // multiple) * multiple, 128 * L + 1, multiple):  # as wide as published GPTs of this depth
            if (rows := (params - 12 * L * w * w) // w - (2 * L + 1)) < 1:
                break
            fitting[L, w] = rows
    layers, width = min(fitting, key=lambda shape: abs(math.log(fitting[shape] / usual)))
    config = GPTConfig(vocab=fitting[layers, width], context=1, layers=layers, width=width, heads=max(1, width // 64))
    with torch.device("meta"):
        return GPT(config)
