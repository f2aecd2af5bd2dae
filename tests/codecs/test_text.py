"""Codecs as they are written."""

from __future__ import annotations

import pytest

from thinwire.codecs import (
    DCT,
    Dense,
    Float,
    Fp4,
    Hadamard,
    Int8,
    RandomK,
    RandomOrthogonal,
    Sign,
    Striding,
    TopK,
    TwoBit,
    parse_codec,
)
from thinwire.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("fp32", Dense("fp32")),
        ("bf16", Dense("bf16")),
        ("int8", Int8()),
        ("fp4", Fp4()),
        ("1-bit", Sign()),
        ("2-bit", TwoBit()),
        ("DCT(64)>>TopK(32)", DCT(64) >> TopK(32)),
        ("DCT(16) >> RandomK(0.05, seed=3) >> Float('bf16')", DCT(16) >> RandomK(0.05, seed=3) >> Float("bf16")),
        ("TopK(k=64) >> TwoBit(group=128)", TopK(64) >> TwoBit(128)),
    ],
)
def test_a_text_means_a_codec(text: str, codec: object) -> None:
    assert parse_codec(text) == codec


@pytest.mark.parametrize(
    "chain",
    [
        DCT(64) >> TopK(32) >> Sign(),
        Hadamard(32) >> Striding(0.25) >> Float("fp16"),
        RandomOrthogonal(64, seed=5) >> TopK(8) >> Int8(64),
        TopK(64) >> TwoBit(),
    ],
    ids=repr,
)
def test_a_chain_is_written_as_it_is_read(chain: object) -> None:
    assert parse_codec(repr(chain)) == chain


@pytest.mark.parametrize(
    "text", ["", "int3", "DCT", "DCT(64) > TopK(3)", "open('x')", "DCT(64, 1, 2, 3)", "1 >> 2", "TopK(k=open('x'))"]
)
def test_anything_else_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match="is no codec; a codec is one of fp32, bf16, fp16"):
        parse_codec(text)


def test_a_bad_setting_is_told_as_such() -> None:
    with pytest.raises(ConfigError, match=r"the k of TopK is a whole number from 1, or a fraction below 1\.0, got 0"):
        parse_codec("DCT(64) >> TopK(0)")
    with pytest.raises(ConfigError, match="each at most once and in this order"):
        parse_codec("TopK(3) >> DCT(64)")
