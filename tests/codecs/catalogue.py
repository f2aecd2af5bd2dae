"""All kinds of codecs, for tests and fuzzing that go through every one of them."""

from __future__ import annotations

from thinwire.codecs import (
    DCT,
    All,
    Codec,
    Dense,
    Float,
    Fp4,
    Hadamard,
    Identity,
    Int8,
    RandomK,
    RandomOrthogonal,
    Sign,
    Striding,
    Ternary,
    TopK,
    TwoBit,
)
from thinwire.codecs.selection import Selection
from thinwire.codecs.transforms import Transform
from thinwire.codecs.values import Values

TRANSFORMS: list[Transform] = [Identity(8), DCT(8), Hadamard(8), RandomOrthogonal(8, seed=5)]
SELECTIONS: list[Selection] = [TopK(3), TopK(0.15), RandomK(3, seed=9), RandomK(0.2), Striding(3), Striding(0.1), All()]
FORMATS: list[Values] = [Float("fp32"), Float("bf16"), Float("fp16"), Int8(), Fp4(), TwoBit(), Ternary(), Sign()]
GROUPED: list[Values] = [Int8(3), Int8(256), Fp4(16), Fp4(7), TwoBit(5), TwoBit(1), Ternary(7), Ternary(1), Sign(1), Sign(100)]
VALUES: list[Values] = [*FORMATS, *GROUPED]

# One gathered codec of every kind: each transform, selection, value format and index code is in one of them.
GATHERED: list[Codec] = [
    DCT(8) >> TopK(3) >> Float("fp32"),
    Hadamard(8) >> TopK(2) >> Int8(),
    Identity(16) >> TopK(20) >> Fp4(),
    TopK(4) >> TwoBit(),
    TopK(2) >> Float("fp16"),
    RandomOrthogonal(8, seed=5) >> TopK(1) >> Sign(),  # indices packed one by one
    DCT(64) >> TopK(0.1) >> Float("bf16"),
    DCT(8) >> RandomK(2, seed=9) >> Int8(3),
    Striding(3) >> Sign(),
    Sign(),
    (DCT(8) >> TopK(3) >> Sign()).split(3),
    Dense("bf16", gather=True),
]
LINEAR: list[Codec] = [Dense("fp32"), Dense("bf16"), Float("fp16"), RandomK(0.2), DCT(8) >> Striding(3) >> Float("bf16")]
EVERY: list[Codec] = [*GATHERED, *LINEAR]
