"""torch's own DistributedDataParallel, metered: the baseline of all comparisons."""

# No `from __future__ import annotations` here: DDP looks at the hook's annotations as types.

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import ConfigError, WireError
from thinwire.links.metered import Exchange, Metered
from thinwire.links.torch import TorchLink
from thinwire.payload import Payload, all_finite


class MeteredDDP:
    """A model under torch's DistributedDataParallel whose all-reduces are booked in a link's meter.

    Args:
        model: the model; its initial weights are broadcast from rank 0.
        link: the metered link whose process group and meter are used.
    """

    def __init__(self, model: nn.Module, link: Metered):
        """Wrap the model and register the counting hook."""
        if not isinstance(link.link, TorchLink):
            raise ConfigError(f"torch's DDP needs a torch link, got {type(link.link).__name__}")
        self.link, self._group = link, link.link.group
        self._launched = 0.0
        self._nbytes = 0
        self._mine_is_bad = False
        self.module = DistributedDataParallel(model, process_group=self._group)
        self.module.register_comm_hook(None, self._hook)

    def rehearse(self, loss: Callable[[nn.Module], Tensor]) -> None:
        """Run one backward pass that leaves no trace, before the first step of a new or resumed run.

        DDP orders its buckets again after its first backward pass, which moves the borders of the ring's chunks and with them
        the order of additions. Without this, the first step after a resume would differ from the same step of an
        uninterrupted run in its last bits.

        Args:
            loss: computes a training loss with the wrapped model.
        """
        buffers = [b.clone() for b in self.module.buffers()]
        with torch.random.fork_rng(devices=[]):
            loss(self.module).backward()
        self.module.zero_grad()
        with torch.no_grad():
            for buffer, saved in zip(self.module.buffers(), buffers, strict=True):
                buffer.copy_(saved)
        self._nbytes, self._mine_is_bad = 0, False

    def _hook(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's default all-reduce, plus the count; called when a bucket of gradients is ready."""
        buffer = bucket.buffer()
        self._mine_is_bad |= not all_finite([buffer])
        self._nbytes += buffer.numel() * buffer.element_size()
        work = dist.all_reduce(buffer.div_(self.link.size), group=self._group, async_op=True)
        assert work is not None
        self._launched = self.link.now()
        return work.get_future().then(lambda future: future.value()[0])

    def backward_done(self) -> list[int]:
        """Book the step's bytes, and as waiting the time that backward spent after it had launched its last bucket.

        Returns:
            The ranks that contributed NaN or Inf, the same list on every worker. They are asked for only when the averaged
            gradient is not finite, which all workers see alike.

        Raises:
            WireError: when it is not, and no worker says that it is to blame.
        """
        waited = self.link.now() - self._launched
        sent, received = self.link.traffic("mean", [self._nbytes] * self.link.size)
        self.link.meter.add(Exchange("round", "mean", self._nbytes, sent, received, waited))
        bad = self._mine_is_bad
        self._nbytes, self._mine_is_bad = 0, False
        if all_finite(p.grad for p in self.module.parameters() if p.grad is not None):
            return []
        answers = self.link.all_gather(Payload.of_bytes(bytes([bad]), purpose="culprits", fixed=True))
        culprits = [rank for rank, answer in enumerate(answers) if answer.to_bytes() == b"\x01"]
        if not culprits:  # no worker reports its own: do not take the step
            raise WireError("the averaged gradient is not finite, although every worker says that its own was")
        return culprits
