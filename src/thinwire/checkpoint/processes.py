"""All processes of all workers: work that they do together, whose errors are raised on all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from thinwire.errors import CheckpointError, LinkError
from thinwire.links.base import Link
from thinwire.payload import Payload
from thinwire.sharding.mesh import shard_of
from thinwire.sharding.shards import Shards

_LENGTH = 1024  # bytes of what a process tells the others after its part of the work


class Processes:
    """The processes of a job: workers, joined by a link, of one or more shards each, or of members that have whole copies.

    Args:
        link: joins the workers.
        params: the parameters in training, which say how a worker is sharded.
    """

    def __init__(self, link: Link, params: Iterable[Tensor]):
        params = list(params)
        self._link, self._shards = link, Shards(params)
        self.worker, self.workers = link.rank, link.size
        self.shard, self.shards = shard_of(params)
        self._site = None if link.two_level is None else link.two_level.inside

    @property
    def first(self) -> bool:
        """Whether this is the process that does what is done once."""
        return self.worker == 0 and self.shard == 0 and self.writes

    @property
    def writes(self) -> bool:
        """Whether this process writes files: of a site, whose members are equal, the first one alone."""
        return self._site is None or self._site.rank == 0

    @property
    def place(self) -> int:
        """This process's number among those of its worker: of its shard, or of its member."""
        return self.shard if self._site is None else self._site.rank

    def random_states(self) -> dict[int, Tensor]:
        """The random state of torch in the processes whose state this one writes, by place; all members of a site ask."""
        mine = torch.get_rng_state()
        if self._site is None:
            return {self.shard: mine}
        return {p.sender or 0: p.data.cpu().clone() for p in self._site.all_gather(Payload(mine, purpose="checkpoint"))}

    def together(self, work: Callable[[], str], *, problem: str) -> list[str]:
        """Do this process's part of the work and wait for all others.

        Args:
            work: what to do; returns what the other processes should know, a few hundred characters.
            problem: the error message where the work fails on any process, with {} where the reason goes.

        Returns:
            What every process returned; the same list on all of them, the first process's first.

        Raises:
            CheckpointError: on all processes, where the work failed on any of them.
        """
        cause, told = None, ""
        try:
            told = work()
        except LinkError:
            raise  # the others cannot be told
        except Exception as error:  # of any kind: the others are waiting for this process's status
            cause = error
        verdict = {"told": told}
        if cause is not None:
            reason = str(cause) if isinstance(cause, CheckpointError) else problem.format(f"{type(cause).__name__}: {cause}")
            verdict = {"failed": _printable(reason)}
        verdict = self._of_site(verdict)
        raws = self._gather(_padded([self.worker, self.shard, verdict]))
        texts = [_parsed(raw, worker=place % self.workers) for place, raw in enumerate(raws)]
        if cause is not None:
            raise CheckpointError(_printable(verdict["failed"])) from cause
        for _, text in texts:
            if "failed" in text:
                raise CheckpointError(_printable(text["failed"]))
        return [text["told"] for _, text in sorted(texts, key=lambda each: each[0])]

    def _of_site(self, verdict: dict[str, str]) -> dict[str, str]:
        """This process's verdict; that of a member of its site which failed, if there is one: the first speaks for all."""
        if self._site is None:
            return verdict
        said = _padded([self.worker, self.shard, verdict])
        told = self._site.all_gather(Payload.of_bytes(said, purpose="checkpoint", fixed=True))
        verdicts = [_parsed(p.to_bytes(), worker=self.worker)[1] for p in told]
        return next((each for each in verdicts if "failed" in each), verdict)

    def _gather(self, raw: bytes) -> list[bytes]:
        workers = self._link.all_gather(Payload.of_bytes(raw, purpose="checkpoint", fixed=True))
        mine = b"".join(p.to_bytes() for p in workers)
        joined = b"".join(self._shards.gather(mine))
        return [joined[i : i + _LENGTH] for i in range(0, len(joined), _LENGTH)]


def _padded(said: list[object]) -> bytes:
    raw = json.dumps(said).encode()
    if len(raw) > _LENGTH:
        raise CheckpointError(f"{len(raw)} bytes to tell the other processes, at most {_LENGTH} are sent")
    return raw.ljust(_LENGTH)


def _parsed(raw: bytes, *, worker: int) -> tuple[tuple[int, int], dict[str, str]]:
    """What a process of a worker said, whatever it sent."""
    try:
        number, shard, said = json.loads(raw)
        ((key, text),) = said.items()
        if number == worker and type(shard) is int and key in ("told", "failed") and isinstance(text, str):
            return (worker, shard), {key: text}
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    return (worker, -1), {"failed": f"rank {worker} sent an invalid status"}


def _printable(text: str) -> str:
    """A text of another process or of an exception: on one line, not too long, and harmless in a terminal."""
    return "".join(c for c in " ".join(text.split()) if c.isprintable())[:500].encode("ascii", "replace").decode()
