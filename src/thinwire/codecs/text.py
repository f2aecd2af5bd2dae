"""Codecs as they are written on a command line and in a run.toml: `bf16`, `int8`, `DCT(64) >> TopK(32) >> Sign()`."""

from __future__ import annotations

import ast

from thinwire.codecs.base import Codec
from thinwire.codecs.chain import Chain
from thinwire.codecs.dense import WIRE_DTYPES, Dense
from thinwire.codecs.selection import All, RandomK, Striding, TopK
from thinwire.codecs.transforms import DCT, Hadamard, Identity, RandomOrthogonal
from thinwire.codecs.values import Float, Fp4, Int8, Sign, Ternary, TwoBit
from thinwire.errors import ConfigError

_STAGES = {
    cls.__name__: cls
    for cls in (
        DCT,
        Hadamard,
        RandomOrthogonal,
        Identity,
        TopK,
        RandomK,
        Striding,
        All,
        Float,
        Int8,
        Fp4,
        TwoBit,
        Ternary,
        Sign,
    )
}
_SHORT = {"int8": Int8, "fp4": Fp4, "2-bit": TwoBit, "ternary": Ternary, "1-bit": Sign}


def parse_codec(text: str) -> Codec:
    """The codec that a text means; `repr` of a chain is such a text.

    Args:
        text: a dense format ("fp32", "bf16", "fp16", averaged on the wire), a format with scales for all values ("int8", "fp4",
            "2-bit", "ternary", "1-bit"), or stages with their settings, joined by >>; `(...).split(4)` for messages of 4 parts.

    Raises:
        ConfigError: showing what is not understood, and what would be.
    """
    if text in WIRE_DTYPES:
        return Dense(text)
    if text in _SHORT:
        return _SHORT[text]()
    try:
        return _codec(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError) as cause:
        if isinstance(cause, ConfigError) and not isinstance(cause, _NotUnderstoodError):
            raise  # a setting of a stage, whose message says what is wrong with it
        names = ", ".join([*WIRE_DTYPES, *_SHORT])
        told = f"{names}, or stages such as 'DCT(64) >> TopK(32) >> Sign()' out of {', '.join(_STAGES)}"
        raise ConfigError(f"{text!r} is no codec; a codec is one of {told}") from None


class _NotUnderstoodError(ConfigError):
    pass


def _codec(node: ast.expr) -> Codec:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.RShift):
        left, right = _codec(node.left), _codec(node.right)
        return left >> right  # pyright: ignore[reportOperatorIssue]  (all of them are stages or chains)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "split":
        return Chain.of(_codec(node.func.value)).split(*map(ast.literal_eval, node.args))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _STAGES:
        named = {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg}
        return _STAGES[node.func.id](*map(ast.literal_eval, node.args), **named)
    raise _NotUnderstoodError("not a stage")
