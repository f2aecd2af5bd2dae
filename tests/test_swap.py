"""swap(): codec meets link between two workers. Both read the same bits, and both refuse what is not finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from thinwire.codecs import Codec, Dense, Int8
from thinwire.codecs.wire import HEADER_NBYTES, PART_NBYTES
from thinwire.core.average import message_nbytes, swap
from thinwire.errors import ConfigError, NonFiniteRound, WireError
from thinwire.links import Link, LinkDecorator, Metered, SoloLink
from thinwire.payload import Payload
from thinwire.sim import World

GATHERED = Dense(gather=True)
PAIRS = {0: 1, 1: 0, 2: 3, 3: 2}  # of five workers rank 4 has no partner


def tensors_of(rank: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(rank)
    return [torch.randn(3, 5, generator=g), torch.randn((), generator=g), torch.empty(0)]


@pytest.mark.parametrize("codec", [GATHERED, Dense("bf16", gather=True), Int8()], ids=str)
def test_each_reads_what_both_messages_decode_to(codec: Codec) -> None:
    results = World(5).run(lambda link: swap(link, codec, tensors_of(link.rank), PAIRS.get(link.rank), round=3))
    for rank, (mine, theirs) in enumerate(results):
        own = codec.decode(codec.encode(tensors_of(rank), round=3), tensors_of(rank), round=3)
        assert all(torch.equal(a, b) for a, b in zip(mine, own, strict=True))
        other = results[PAIRS.get(rank, rank)][0]
        assert all(torch.equal(a, b) for a, b in zip(theirs, other, strict=True))


def test_it_is_one_message_in_one_envelope() -> None:
    def worker(bare: Link) -> tuple:
        link = Metered(bare)
        swap(link, GATHERED, tensors_of(0), 1 - link.rank)
        return [(e.op, e.purpose, e.payload, e.sent) for e in link.meter.recent], message_nbytes(link, GATHERED, tensors_of(0))

    for seen, expected in World(2).run(worker):
        assert expected == HEADER_NBYTES + PART_NBYTES + 16 * 4
        assert seen == [("pair", "round", expected, expected)]


@pytest.mark.parametrize("how", ["nan", "invalid"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_both_refuse_what_is_not_finite_and_the_other_pairs_do_not_hear_of_it(how: str, culprit: int) -> None:
    def worker(link: Link) -> tuple[str, tuple[int, ...]] | None:
        tensors = tensors_of(link.rank)
        if link.rank == culprit and how == "nan":
            tensors[0][1, 2] = float("nan")
        try:
            swap(link, GATHERED, tensors, PAIRS.get(link.rank), round=7, invalid=link.rank == culprit and how == "invalid")
        except NonFiniteRound as refusal:
            return str(refusal), refusal.culprits
        return None

    told = f"round 7 refused by rank 0 and rank 1: NaN or Inf in the contribution of rank {culprit}", (culprit,)
    assert World(5).run(worker) == [told, told, None, None, None]


def test_without_a_partner_one_refuses_alone() -> None:
    with pytest.raises(NonFiniteRound, match="round 0 refused by rank 0: NaN or Inf in the contribution of rank 0"):
        swap(SoloLink(), GATHERED, [torch.tensor([float("inf")])], None)


def test_all_shards_of_a_worker_refuse_together() -> None:
    with pytest.raises(NonFiniteRound, match="another shard of this worker refused it"):
        swap(SoloLink(), GATHERED, [torch.ones(2)], None, any_shard=_raised_after_posting())


def _raised_after_posting():
    asked = []

    def any_shard(flag: bool) -> bool:
        asked.append(flag)
        return flag or len(asked) == 2  # asked third: whether any shard could not read the messages

    return any_shard


def test_what_is_averaged_on_the_wire_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"two workers cannot do: take Dense\(gather=True\)"):
        swap(SoloLink(), Dense(), [torch.ones(2)], None)


class Damaging(LinkDecorator):
    """Flips a bit of the partner's message."""

    def post(self, payload: Payload, op):
        ticket = self.link.post(payload, op)
        result = [p.like(p.data.clone()) for p in ticket.wait()]
        result[1 - self.rank].data[-1] ^= 1
        ticket._result = result
        return ticket


def test_a_damaged_message_is_refused_with_its_sender() -> None:
    def worker(link: Link) -> str:
        with pytest.raises(WireError) as caught:
            swap(Damaging(link), GATHERED, [torch.ones(2)], 1 - link.rank)
        return str(caught.value)

    for rank, said in enumerate(World(2).run(worker)):
        assert f"the message of rank {1 - rank}: part 0 of 1: wrong checksum" in said


def test_a_message_of_another_round_is_refused() -> None:
    def worker(link: Link) -> None:
        with pytest.raises(WireError, match=f"rank {1 - link.rank}: of round {1 - link.rank}, in round {link.rank}"):
            swap(link, GATHERED, [torch.ones(2)], 1 - link.rank, round=link.rank)

    World(2).run(worker)
