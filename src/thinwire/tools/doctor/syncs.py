"""What a step and a round of a method ask of a device: `audit` takes steps of simulated workers on the pretend device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from thinwire.algorithms import found
from thinwire.core.optimizer import Algorithm
from thinwire.links.base import Link, LinkDecorator, Ticket
from thinwire.network import Op
from thinwire.payload import Payload
from thinwire.sim import World
from thinwire.tools.build import optimizer_of
from thinwire.tools.config import RunConfig, resolve_algorithm
from thinwire.tools.doctor.pretend import TO_DEVICE, TO_HOST, Audit, Crossing, PretendTensor, current_audit, on_device, on_host
from thinwire.tools.doctor.pretend import device as pretend_device

Backend = Literal["nccl", "gloo"]
BACKENDS: tuple[Backend, ...] = ("nccl", "gloo")
Make = Callable[[list[nn.Parameter], Link], Algorithm]

SHAPES = (
    (256, 192),
    (192,),
    (192, 320),
    (130, 100),
    (64,),
)  # three in blocks of 64, one of them not in whole ones; two sent whole
STEPS_PER_ROUND = 2
FIRST, LOCAL, ROUND, ALARM = "first step", "local step", "round", "round with the alarm"


class PretendLink(LinkDecorator):
    """A link that moves messages of the pretend device as a backend would, and has the copies noted.

    Args:
        link: what carries the messages, on the host.
        backend: "nccl" moves what is on a device from one to the other: messages made on the host are copied there first, and
            arrive there. "gloo" moves what is on the host: a message of a device takes one copy out, and what arrives one in.
    """

    def __init__(self, link: Link, backend: Backend):
        """Wrap `link`."""
        super().__init__(link)
        self.backend: Backend = backend

    @property
    def moves_devices(self) -> bool:
        """As the backend does."""
        return self.backend == "nccl"

    def post(self, payload: Payload, op: Op) -> Ticket:
        """Post on the wrapped link what it would be given on the host."""
        data, audit = payload.data, current_audit()
        if self.backend == "nccl":
            data = data.to(pretend_device())
        elif isinstance(data, PretendTensor) and audit is not None:
            audit.note(TO_HOST, payload.nbytes)
        posted = self.link.post(payload.like(on_host(data).clone()), op)
        return _PretendTicket(posted, self.backend) if isinstance(data, PretendTensor) else posted


class _PretendTicket(Ticket):
    def __init__(self, ticket: Ticket, backend: Backend):
        self.ticket, self.backend = ticket, backend

    def _finish(self) -> list[Payload]:
        result, audit = self.ticket.wait(), current_audit()
        if self.backend == "gloo" and audit is not None:
            audit.note(TO_DEVICE, sum(p.nbytes for p in result))
        return [p.like(PretendTensor(p.data.clone())) for p in result]


@dataclass(frozen=True)
class Row:
    """What one kind of step asked of the device.

    Attributes:
        algorithm: its name.
        backend: of the link.
        what: "first step", "local step", "round", "round with the alarm".
        launches: operations on the device.
        crossings: between host and device.
    """

    algorithm: str
    backend: Backend
    what: str
    launches: int
    crossings: tuple[Crossing, ...]

    @property
    def blocking(self) -> int:
        """How often the host waited for the device."""
        return sum(crossing.blocking for crossing in self.crossings)

    @property
    def later(self) -> int:
        """Copies that the host did not wait for."""
        return len(self.crossings) - self.blocking

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        told = {name: value for name, value in asdict(self).items() if name != "crossings"}
        return told | {"blocking": self.blocking, "later": self.later, "crossings": [asdict(c) for c in self.crossings]}


def audit(make: Make, *, backend: Backend, workers: int = 2, shapes: Sequence[tuple[int, ...]] = SHAPES) -> dict[str, Audit]:
    """What the first worker's device is asked to do at its first step, and in the last local step and the last round.

    Args:
        make: makes the optimizer of parameters on the pretend device.
        backend: of the link.
        workers: how many are simulated.
        shapes: of the parameters.
    """

    def work(link: Link) -> dict[str, Audit]:
        seen: dict[str, Audit] = {}
        with Audit():  # whatever makes a tensor on the device needs one
            torch.manual_seed(0)
            params = [nn.Parameter(on_device(torch.randn(shape) * 0.02)) for shape in shapes]
            opt = make(params, PretendLink(link, backend))
            torch.manual_seed(1 + link.rank)
            for step in range(3 * STEPS_PER_ROUND):
                for p in params:
                    p.grad = on_device(torch.randn(p.shape))
                before = opt.rounds
                with Audit() as looking:
                    opt.step()
                seen[FIRST if step == 0 else ROUND if opt.rounds > before else LOCAL] = looking
        return seen

    return World(workers, step_time=0.0).run(work)[0]


def audit_named(name: str, *, wire: str | None = None, backend: Backend, alarm: bool = True) -> list[Row]:
    """`audit` of a method by its name on the command line, and of a round with the divergence alarm.

    Args:
        name: such as "diloco" or "demo-v1".
        wire: its codec, as text; the method's own by default.
        backend: of the link.
        alarm: whether to look at a round with the alarm too.
    """
    cls = found()[resolve_algorithm(name, found())[0]]
    few = {"H": STEPS_PER_ROUND, "fragments": STEPS_PER_ROUND}
    rounds = {name: value for name, value in few.items() if name in inspect.signature(cls.__init__).parameters}
    config = RunConfig(algorithm=name, wire=wire, steps=10**6)
    config.validate()

    def maker(alarm_every: int) -> Make:
        settings = {**rounds, "alarm_every": alarm_every}
        return lambda params, link: _with_foreach(optimizer_of(replace(config, settings=settings), _Parameters(params), link))

    seen = audit(maker(0), backend=backend)
    if alarm:
        seen[ALARM] = audit(maker(1), backend=backend)[ROUND]
    return [Row(name, backend, what, sum(a.launches.values()), tuple(a.crossings)) for what, a in seen.items()]


def _with_foreach(optimizer: Algorithm) -> Algorithm:
    """Have the inner optimizer step all tensors at once: torch's own choice on a GPU, which it makes for plain tensors only."""
    for group in optimizer.param_groups:
        if "foreach" in group:
            group["foreach"] = True
    return optimizer


class _Parameters(nn.Module):
    """A model that is nothing but its parameters."""

    def __init__(self, params: list[nn.Parameter]):
        super().__init__()
        self.all = nn.ParameterList(params)
