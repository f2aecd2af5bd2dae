"""torchtitan: an optimizer container whose workers are titan's replicas, and the meshes that leave the exchange to it.

    config.optimizer = ThinwireOptimizers.Config(param_groups=..., algorithm="diloco", algorithm_kwargs={"H": 32})

In titan a replica is what FSDP, tensor and pipeline parallelism make of one model; replicas are the axis "dp_replicate", over
which it averages every gradient (HSDP). Here each replica is a worker, and the axis carries the optimizer's messages only.

titan's trainer needs a GPU. The container, titan's scheduler and checkpointer with it, and the meshes are tested on the CPU;
`ThinwireParallelDims` in a training of titan's trainer is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import tyro
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from thinwire.algorithms import found
from thinwire.core.optimizer import Algorithm
from thinwire.core.state_layout import state_layout
from thinwire.core.wrapper import Wrapper
from thinwire.errors import CheckpointError, ConfigError, check_choice
from thinwire.integrations.optional import require
from thinwire.links import Link, SoloLink, TorchLink, connect
from thinwire.sharding.mesh import shard_of
from thinwire.sharding.shards import reshard

_OptimizersContainer: Any = require("torchtitan.components.optimizer", extra="torchtitan").OptimizersContainer
_ParallelDims: Any = require("torchtitan.distributed", extra="torchtitan").ParallelDims


class ThinwireOptimizers(_OptimizersContainer):
    """titan's optimizers with a thinwire method around them: one for all Adam or AdamW groups of all model parts.

    `step`, `zero_grad`, schedulers and checkpoints are titan's. Every worker's own state, its parameters between two rounds
    included, is saved under keys of its own (`worker1.state.layers.0.weight.inner.exp_avg`), so that training resumes bit for
    bit with the same number of workers. The model in titan's checkpoint is the first worker's: between two rounds, use
    `shared_model()` for what is evaluated or exported.

    Args:
        config: see `Config`.
        model_parts: of this process, as titan has made them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_OptimizersContainer.Config):
        """titan's, and the method.

        Attributes:
            algorithm: its name, as `thinwire algorithms` lists them.
            algorithm_kwargs: its settings, such as {"H": 32}. A method without an inner optimizer (demo) takes lr and
                weight_decay from titan's groups.
            link: joins the workers, such as `ThinwireParallelDims.link()`; set by the program, not on the command line. That
                of `thinwire.connect()` by default, where every process is a worker.
        """

        algorithm: str = "diloco"
        algorithm_kwargs: dict[str, Any] = field(default_factory=dict)
        link: Annotated[Any, tyro.conf.Suppress] = None

    optimizers: list[Algorithm]

    def __init__(self, config: Config, *, model_parts: list[nn.Module]):
        """Make titan's optimizers, and the method around them."""
        check_choice("algorithm", config.algorithm, sorted(found()))
        super().__init__(config, model_parts=model_parts)
        self.link: Link = config.link or _link_of_processes(self.param_groups)
        method = found()[config.algorithm]
        self.optimizers = [_made(method, inner, self.link, config.algorithm_kwargs) for inner in _merged(self.optimizers)]

    def finish(self) -> None:
        """Bring in the last local steps; call it after the last step, before the last checkpoint."""
        for opt in self.optimizers:
            opt.finish()

    @contextmanager
    def shared_model(self) -> Iterator[None]:
        """Within it the model parts have the parameters that all workers agreed on last."""
        with ExitStack() as shown:
            for opt in self.optimizers:
                shown.enter_context(opt.shared_model())
            self._forget_gathered()
            yield
        self._forget_gathered()

    def state_dict(self) -> dict[str, Any]:
        """Flat, by parameter name, as titan's; what a worker has of its own under its own keys."""
        return {key: value for opt in self.optimizers for key, value in self._flat(opt).items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave; checked before anything changes."""
        for opt in self.optimizers:
            if missing := [key for key in self._flat(opt) if key not in state_dict]:
                raise CheckpointError(
                    f"the checkpoint has no {missing[0]!r} ({len(missing)} missing in all): it was written by another "
                    f"optimizer or by fewer than {self.link.size} workers"
                )
        for opt in self.optimizers:
            self._load(opt, state_dict)

    def _flat(self, opt: Algorithm) -> dict[str, Any]:
        own, names = f"worker{self.link.rank}.", _names(opt)
        saved, flat = opt.state_dict(), dict[str, Any]()
        for each in state_layout(opt).parameters:
            for entry in each.entries:
                owner = "" if entry.replicated else own
                flat[f"{owner}state.{names[each.index]}.{entry.key}"] = saved["state"][each.index][entry.key]
            if not each.replicated:
                # A copy: the checkpointer reads into what it is given, and the model's own entry is the first worker's.
                flat[f"{own}param.{names[each.index]}"] = each.param.detach().clone()
        for number, group in enumerate(saved["param_groups"]):
            first = opt.param_groups[number]["param_names"][0]  # the number depends on how titan splits the model
            flat |= {f"{own}group.{first}.{key}": value for key, value in group.items() if key not in _IN_PLACE}
        return flat

    def _load(self, opt: Algorithm, flat: Mapping[str, Any]) -> None:
        own, names, state = f"worker{self.link.rank}.", _names(opt), opt.state_dict()
        layout = state_layout(opt)
        for each in layout.parameters:
            for entry in each.entries:
                owner = "" if entry.replicated else own
                state["state"][each.index][entry.key] = flat[f"{owner}state.{names[each.index]}.{entry.key}"]
        for number, group in enumerate(state["param_groups"]):
            first = opt.param_groups[number]["param_names"][0]
            group.update({key: flat[f"{own}group.{first}.{key}"] for key in group if key not in _IN_PLACE})
        opt.load_state_dict(state)
        with torch.no_grad():
            for each in layout.parameters:
                if not each.replicated:
                    each.param.copy_(flat[f"{own}param.{names[each.index]}"])
        self._forget_gathered()

    def _forget_gathered(self) -> None:
        for part in self.model_parts:
            reshard(part)


class ThinwireParallelDims(_ParallelDims):
    """titan's meshes where each replica is a worker: FSDP shards within a worker, and nothing averages over workers.

    "dp_replicate" is hidden from titan, which would make HSDP of it; `link()` is on it. "batch" and "loss" join all processes
    until `stay_in_worker()`, so that the data loader gives each worker its own part. Then they join a worker's processes only:
    the number of tokens by which titan divides the loss is the worker's, and is not asked of other workers at every step.

    In a subclass of titan's trainer:

        def init_distributed(self):
            dims = ThinwireParallelDims.from_config(self.config.parallelism, super().init_distributed().world_size)
            self.config.optimizer.link = dims.link()
            return dims

    and `self.parallel_dims.stay_in_worker()` at the end of its constructor.
    """

    _in_worker = False

    def __post_init__(self) -> None:
        """Refuse what was not thought through."""
        super().__post_init__()
        if self.cp > 1:
            raise ConfigError(f"{type(self).__name__} has no context parallelism, got a degree of {self.cp}")

    def link(self) -> Link:
        """Joins the workers: this process and those that hold the same part of the model in the others."""
        if self.dp_replicate == 1:
            return SoloLink()
        return TorchLink(super().get_optional_mesh("dp_replicate"))

    def stay_in_worker(self) -> None:
        """Once the data loader is made: what titan sums over "batch" and "loss" is summed within a worker."""
        self._in_worker = True

    @property
    def dp_replicate_enabled(self) -> bool:
        """Never: titan asks it before it averages gradients over that axis."""
        return False

    @property
    def dp_enabled(self) -> bool:
        """Whether there are others to sum with: all processes at first, then those of this worker."""
        return self.dp_shard > 1 if self._in_worker else super().dp_enabled

    def get_optional_mesh(self, dims: str | list[str], **options: Any) -> Any:
        """titan's, without the axis between workers."""
        names = [dims] if isinstance(dims, str) else dims
        if "dp_replicate" in names:
            return None
        if self._in_worker and names in (["batch"], ["loss"]):
            sharded = "fsdp" if self.spmd_backend == "partial_dtensor" else "dp_shard"
            return super().get_optional_mesh(sharded, **options) if self.dp_shard > 1 else None
        return super().get_optional_mesh(dims, **options)


_IN_PLACE = ("params", "param_names")  # of a group: not settings


def _names(opt: Algorithm) -> list[str]:
    return [name for group in opt.param_groups for name in group["param_names"]]


def _merged(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """One optimizer for all of one type, so that a round is one message; titan makes one for each model part."""
    merged: list[Optimizer] = []
    for optimizer in optimizers:
        same = [each for each in merged if type(each) is type(optimizer) and type(each) in (Adam, AdamW)]
        if same:
            for group in optimizer.param_groups:
                same[0].add_param_group(group)
        else:
            merged.append(optimizer)
    return merged


def _made(method: type[Algorithm], inner: Optimizer, link: Link, settings: Mapping[str, Any]) -> Algorithm:
    """The method around an optimizer, or on its parameters where it is the optimizer itself."""
    if issubclass(method, Wrapper):
        return method(inner, link, **settings)
    kept = ("params", "param_names", "lr", "weight_decay")
    groups = [{key: group[key] for key in kept if key in group} for group in inner.param_groups]
    return method(groups, link, **settings)


def _link_of_processes(groups: Sequence[Mapping[str, Any]]) -> Link:
    if shard_of([p for group in groups for p in group["params"]])[1] > 1:
        raise ConfigError(
            "the model is sharded, so not every process is a worker: set the config's link to ThinwireParallelDims.link()"
        )
    return connect()
