"""What is sent: codecs turn the tensors of a round into one message and back."""

from thinwire.codecs.aggregate import Mean
from thinwire.codecs.base import Codec
from thinwire.codecs.chain import Chain, Encoded
from thinwire.codecs.dense import WIRE_DTYPES, Dense
from thinwire.codecs.parts import Parts
from thinwire.codecs.received import Received
from thinwire.codecs.selection import All, RandomK, Striding, TopK
from thinwire.codecs.text import parse_codec
from thinwire.codecs.transforms import DCT, Hadamard, Identity, RandomOrthogonal
from thinwire.codecs.values import Float, Fp4, Int8, Sign, TwoBit

__all__ = [
    "DCT",
    "WIRE_DTYPES",
    "All",
    "Chain",
    "Codec",
    "Dense",
    "Encoded",
    "Float",
    "Fp4",
    "Hadamard",
    "Identity",
    "Int8",
    "Mean",
    "Parts",
    "RandomK",
    "RandomOrthogonal",
    "Received",
    "Sign",
    "Striding",
    "TopK",
    "TwoBit",
    "parse_codec",
]
