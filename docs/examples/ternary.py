"""A value format of one's own in a chain: -1, 0 or 1 times a scale, five values in a byte."""

from dataclasses import dataclass

import numpy as np
import torch

import thinwire
from thinwire import DCT, TopK
from thinwire.codecs import Stage
from thinwire.codecs.values import Values
from thinwire.errors import WireError

GROUP, DIGITS = 240, np.array([1, 3, 9, 27, 81], np.uint8)


def groups_of(row):
    """The group of each value of a row; none has values of two tensors."""
    return np.repeat(np.arange(row.groups(GROUP)), np.diff(row.borders(GROUP)))


@dataclass(frozen=True, repr=False)
class Trits(Values, Stage):
    """1.6 bits per value, and a float32 scale for every 240.

    Args:
        threshold: what is smaller than this part of the mean |x| of its group becomes zero.
    """

    threshold: float = 0.7

    def group_of(self, k):
        return GROUP

    def nbytes_of(self, row):
        return 4 * row.groups(GROUP) + -(-row.count // 5)

    def write(self, values, row):
        size, group = np.abs(values), groups_of(row)
        large = size > self.threshold * (np.bincount(group, size) / np.bincount(group))[group]
        with np.errstate(invalid="ignore"):  # NaN and Inf make the scale NaN, so that the exchange finds them
            scales = np.bincount(group, size * large) / np.maximum(np.bincount(group, large), 1)
        digits = np.ones((-(-row.count // 5), 5), np.uint8)
        digits.reshape(-1)[: row.count] = np.where(large, 1 + np.sign(values), 1)
        raw = np.concatenate([scales.astype("<f4").view(np.uint8), digits @ DIGITS])
        return raw, self.read(raw, row, 0, row.count, check=False)

    def read(self, raw, row, start, stop, *, check=True):
        scales, codes = np.split(raw, [4 * row.groups(GROUP)])
        scale = scales.view("<f4")[groups_of(row)[start:stop]]
        five = codes[start // 5 : -(-stop // 5)]
        if check and not (np.isfinite(scale).all() and (five < 243).all()):
            raise WireError("a scale that is not finite, or five values that are none")
        digits = (five[:, None] // DIGITS % 3).reshape(-1)[start % 5 :][: stop - start]
        return (digits.astype(np.float32) - 1) * scale


def meet(link):
    gradient = torch.randn(1000, 300, generator=torch.Generator().manual_seed(link.rank))
    codec = DCT(64) >> TopK(32) >> Trits()
    (mean,), (sent,) = thinwire.average(link, codec, [gradient], want_sent=True)
    return codec, mean, sent, codec.nbytes([gradient])


if __name__ == "__main__":
    (codec, mean, sent, nbytes), (_, same_mean, other_sent, _) = thinwire.World(2).run(meet)
    assert torch.equal(mean, same_mean) and torch.allclose(mean, (sent + other_sent) / 2, atol=1e-5)
    print(f"{codec} takes {nbytes} bytes")
