"""What is sent: codecs turn the tensors of a round into one message and back."""

from thinwire.codecs.base import Codec
from thinwire.codecs.dense import WIRE_DTYPES, Dense

__all__ = ["WIRE_DTYPES", "Codec", "Dense"]
