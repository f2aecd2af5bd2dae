"""What is sent: codecs turn the tensors of a round into one message and back."""

from thinwire.codecs.aggregate import Mean
from thinwire.codecs.base import Codec, Messages
from thinwire.codecs.chain import Chain, Stage
from thinwire.codecs.decoder import Received
from thinwire.codecs.dense import WIRE_DTYPES, Dense
from thinwire.codecs.encoder import Encoded
from thinwire.codecs.made import Made
from thinwire.codecs.parts import Parts
from thinwire.codecs.schedule import CodecSchedule, parse_wire
from thinwire.codecs.selection import All, RandomK, Striding, TopK
from thinwire.codecs.text import parse_codec
from thinwire.codecs.transforms import DCT, Hadamard, Identity, RandomOrthogonal
from thinwire.codecs.values import Float, Fp4, Int8, Sign, Ternary, TwoBit

__all__ = [
    "DCT",
    "WIRE_DTYPES",
    "All",
    "Chain",
    "Codec",
    "CodecSchedule",
    "Dense",
    "Encoded",
    "Float",
    "Fp4",
    "Hadamard",
    "Identity",
    "Int8",
    "Made",
    "Mean",
    "Messages",
    "Parts",
    "RandomK",
    "RandomOrthogonal",
    "Received",
    "Sign",
    "Stage",
    "Striding",
    "Ternary",
    "TopK",
    "TwoBit",
    "parse_codec",
    "parse_wire",
]
