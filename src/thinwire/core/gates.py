"""Gates: what is checked before a step, and what all workers must agree on before the first round.

* `handshake`: before the first round the workers compare what they were started with and refuse a difference by its name;
* `check_param_groups` and `check_settings`: before every step;
* `tell_all`: worker 0 tells the others something, such as figures.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.dense import Dense
from thinwire.codecs.wire import VERSION
from thinwire.core.buffers import check_remembered
from thinwire.core.exchange import AnyShard, alone
from thinwire.core.hashing import hash_tensors, show_hash
from thinwire.core.slots import COUNTERS, WHOSE, SlotOptimizer
from thinwire.errors import ConfigError, FingerprintMismatch, WireError
from thinwire.kernels import SETTING
from thinwire.links.base import Link
from thinwire.payload import LONGEST, Payload, describe
from thinwire.sharding.shards import local

if TYPE_CHECKING:
    from thinwire.core.optimizer import Algorithm

log = logging.getLogger("thinwire")

J = TypeVar("J")
V = TypeVar("V")

# --- The handshake -----------------------------------------------------------------------------------------------------


def handshake(
    link: Link,
    fingerprint: Mapping[str, object],
    *,
    any_shard: AnyShard = alone,
    buffers: int = 0,
    gradients: int = 0,
) -> None:
    """Refuse to begin unless all workers were started with the same settings.

    It is one message of 32 bytes where all is well: 16 of the fingerprint's digest, a hash of the buffers and one of the
    gradients with 8 each.

    Args:
        link: the wire.
        fingerprint: names and JSON-able values of all that must agree.
        any_shard: see `Exchange`.
        buffers: `hash_tensors` of buffers that should start alike on all workers; a difference is a warning on all of them.
        gradients: `hash_tensors` of this worker's gradients, or of its shard of them, which should differ between workers; a
            warning on all of them where they are equal. 0 where they say nothing.

    Raises:
        FingerprintMismatch: on every worker, naming what differs, where, and both values.
        WireError: on every worker, naming the one whose message makes no sense.
    """
    told = {"wire version": VERSION, "handshake version": _VERSION, **fingerprint}
    digest = hashlib.sha256(json.dumps(told, default=str, sort_keys=True).encode()).digest()[:_DIGEST]
    mine = digest + b"".join(number.to_bytes(_HASH, "little", signed=True) for number in (buffers, gradients))
    hashes = [p.to_bytes() for p in link.all_gather(Payload.of_bytes(mine, purpose="handshake", fixed=True))]
    odd = [rank for rank, theirs in enumerate(hashes) if theirs[:_DIGEST] != hashes[0][:_DIGEST]]
    if not any_shard(bool(odd)):
        _warn_of_buffers([theirs[_DIGEST : _DIGEST + _HASH] for theirs in hashes])
        _warn_of_gradients([theirs[_DIGEST + _HASH :] for theirs in hashes], any_shard)
        return
    if not odd:
        raise FingerprintMismatch("workers were started differently: another shard of this worker says in what")
    text = json.dumps(condensed(told), default=str).encode()
    if len(text) > LONGEST["handshake"]:
        text = json.dumps({"settings": f"{len(text)} bytes, too long to tell, with hash {_sha(text)}"}).encode()
    texts = link.all_gather(Payload.of_bytes(text, purpose="handshake"))
    first, *others = [read_json(t, rank, dict) for rank, t in enumerate(texts)]
    for rank, other in enumerate(others, start=1):
        compare_settings(first, other, ("on rank 0", f"on rank {rank}"))
    raise WireError("its settings are said to differ from rank 0's, but are the same", rank=odd[0])


def compare_settings(first: object, other: object, where: tuple[str, str]) -> None:
    """Refuse settings that differ from others.

    Args:
        first: what the others have.
        other: what this worker, or one of the others, has.
        where: the two are, in words: "on rank 0" and "on rank 1".

    Raises:
        FingerprintMismatch: naming what differs, where, and both values.
    """
    found = _differences(first, other, where)
    try:
        differences, rest = [*itertools.islice(found, 3)], sum(1 for _ in found)
    except RecursionError:
        raise WireError(f"settings {where[1]} that are nested too deep") from None
    if differences:
        more = f" (and {rest} more)" if rest else ""
        hint = next((how for what, how in _HINTS.items() if what in differences[0]), "")
        raise FingerprintMismatch(f"workers were started differently: {'; '.join(differences)}{more}{hint}")


_VERSION = 2  # of the first message; in the fingerprint, so that workers of two versions tell each other
_DIGEST = 16  # bytes of a digest that travel
_HASH = 8  # bytes of a hash of tensors

STARTING, FROZEN = "starting value of ", "frozen parameters"  # names of hashes in a fingerprint
KERNELS, TRITON = "C kernels", "Triton kernels"
_HINTS = {
    TRITON: f": install thinwire[triton] on all workers, or set {SETTING}=off on all of them; see docs/gpu.md",
    KERNELS: f": install a C compiler (cc) on all workers, or set {SETTING}=off on all of them; see docs/performance.md",
    STARTING: ": seed all workers alike before the model is built, or call thinwire.broadcast(link, model)",
    FROZEN: ": load the same base model on all workers, or call thinwire.broadcast(link, model)",
}


def _warn_of_buffers(hashes: Sequence[bytes]) -> None:
    odd = [f"rank {rank}" for rank, theirs in enumerate(hashes) if theirs != hashes[0]]
    if odd:
        log.warning(
            "the buffers (those given as buffers=, such as BatchNorm's running statistics) of %s start with other values than "
            "rank 0's: call thinwire.broadcast(link, model) on all workers before the optimizer is made",
            _short(", ".join(odd)),
        )


def _warn_of_gradients(hashes: Sequence[bytes], any_shard: AnyShard) -> None:
    """Warn where all workers have the same gradients, on all shards of theirs that have any."""
    differ = any_shard(len(set(hashes)) > 1)
    known = any_shard(any(hashes[0]))
    if known and not differ and len(hashes) > 1:
        log.warning(
            "all %d workers have the same gradients, though each should have those of its own data. Either something averages "
            "them at every step, such as DistributedDataParallel around the model, which also sends them all: train the model "
            "that is not wrapped (accelerate, Lightning and the Hugging Face Trainer wrap it by themselves). Or all workers "
            "read the same data: give each its own part by link.data_rank and link.data_size",
            len(hashes),
        )


class _Missing:
    def __repr__(self) -> str:
        return "missing"


_MISSING = _Missing()


def _differences(first: object, other: object, where: tuple[str, str], name: str = "") -> Iterator[str]:
    """What differs, as sentences, one per leaf."""
    if isinstance(first, dict) and isinstance(other, dict):
        for k in [*first, *(k for k in other if k not in first)]:  # in the order of telling: the method before its details
            yield from _differences(first.get(k, _MISSING), other.get(k, _MISSING), where, f"{name}.{k}" if name else k)
    elif isinstance(first, list) and isinstance(other, list) and len(first) == len(other):
        for i, (a, b) in enumerate(zip(first, other, strict=True)):
            yield from _differences(a, b, where, f"{name}[{i}]")
    elif isinstance(first, list) and isinstance(other, list):
        yield f"{_short(name)} has {len(first)} entries {where[0]} and {len(other)} {where[1]}"
    # As text, so that 1 and True are two things.
    elif json.dumps(first, default=repr) != json.dumps(other, default=repr):
        if name.startswith((STARTING, FROZEN)):  # of them only a hash is known
            name = f"the {name} {'differ: their' if name.startswith(FROZEN) else 'differs: its'} hash"
        yield f"{_short(name)} is {_short(repr(first))} {where[0]} and {_short(repr(other))} {where[1]}"


def _short(text: str, limit: int = 100) -> str:
    """A text that came from another worker, fit for an error message."""
    cut = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return "".join(c if c.isprintable() else "?" for c in cut)


def condensed(value: object, run: int = 1000) -> object:
    """A fingerprint without what would be too long to tell: of long lists and texts, the length and hashes of the parts."""
    if isinstance(value, Mapping):
        return {k: condensed(v) for k, v in value.items()}
    if isinstance(value, list | tuple) and len(value) > run:
        parts = [value[i : i + run] for i in range(0, len(value), run)]
        hashes = {f"hash of entries from {i * run}": _sha(json.dumps(p, default=str).encode()) for i, p in enumerate(parts)}
        return {"number of entries": len(value), **hashes}
    if isinstance(value, list | tuple):
        return [condensed(v) for v in value]
    if isinstance(value, str) and len(value) > run:
        return f"{value[:80]}... ({len(value)} characters with hash {_sha(value.encode())})"
    return value


def _sha(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]


# --- What other workers say --------------------------------------------------------------------------------------------


def read_json(message: Payload, rank: int, kind: type[J] = object) -> J:
    """What another worker says in JSON; whatever is wrong with it is a `WireError` that names the worker.

    Args:
        message: the text.
        rank: whose it is.
        kind: what it must be.
    """
    try:
        told = json.loads(message.to_bytes().decode(), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as cause:
        raise WireError(f"not the JSON text that it should be: {_short(str(cause))}", rank=rank) from None
    if not isinstance(told, kind):
        raise WireError(f"a JSON {type(told).__name__}, where a {kind.__name__} should be", rank=rank)
    return told


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    told = dict(pairs)
    if len(told) != len(pairs):
        raise ValueError("a key that stands there twice")
    return told


def read_number(message: Payload, rank: int) -> float:
    """A float64 that another worker says, which must be finite and not negative."""
    number = float(message.data.cpu().clone().view(torch.float64))
    if not 0 <= number < math.inf:
        raise WireError(f"the number {number!r}, where one that is finite and not negative should be", rank=rank)
    return number


def say_number(number: float, purpose: str) -> Payload:
    """The message that `read_number` reads."""
    return Payload(torch.tensor([number], dtype=torch.float64, device="cpu").view(torch.uint8), purpose=purpose)


def tell_all(link: Link, said: dict[str, V], kind: type[V]) -> dict[str, V]:
    """What worker 0 says, on every worker; what the others say is not heard.

    Args:
        link: the wire.
        said: by worker 0; at most 64 KiB as JSON.
        kind: of the values; whole numbers are floats too.

    Raises:
        WireError: on every worker, when it is not that.
    """
    message = Payload.of_bytes(json.dumps(said).encode(), purpose="broadcast metrics")
    told: dict[str, V] = read_json(link.all_gather(message)[0], 0, dict)
    for name, value in told.items():
        if not isinstance(value, kind) and not (kind is float and type(value) is int):
            raise WireError(f"{_short(name)} is {_short(repr(value))}, where a {kind.__name__} should be", rank=0)
    return told


def handshake_once(optimizer: Algorithm) -> None:
    """Compare fingerprints once, at the first step: a wrong setting is found before H steps are spent on it."""
    if not optimizer.handshake_done:
        optimizer.engine.handshake()
        optimizer.handshake_done = True
        check_remembered(optimizer)
        _tell_of_wide_messages(optimizer)


def greet(optimizer: Algorithm) -> None:
    """Compare the fingerprints of all workers, which all call it."""
    buffers = optimizer.buffer_average.starting if optimizer.steps == 0 else 0
    gradients = hash_of_gradients(optimizer) if optimizer.link.peers().size > 1 else 0  # there is nobody to compare with
    hashes = {"buffers": buffers, "gradients": gradients}
    handshake(optimizer.link, optimizer.fingerprint(), any_shard=optimizer.shards.any, **hashes)


def hash_of_gradients(optimizer: SlotOptimizer) -> int:
    """Of this process's gradients; 0 where they tell nothing, since none, zeros, NaN and Inf are alike on any worker."""
    grads = [local(p.grad) for p in optimizer._active if p.grad is not None]
    if not any(bool((g.isfinite() & (g != 0)).any()) for g in grads):
        return 0
    return hash_tensors(grads)


_NARROW = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def _tell_of_wide_messages(optimizer: Algorithm) -> None:
    """Say, where a run begins, that parameters of 16 bits are sent with 32; once per run and not by every worker."""
    codec, peers, dtypes = optimizer.codec, optimizer.link.peers(), {p.dtype for p in optimizer._active}
    if not isinstance(codec, Dense) or peers.size == 1 or peers.rank != 0 or optimizer.steps:
        return
    if codec.wire_dtype == torch.float32 and dtypes <= _NARROW.keys():
        names = " and ".join(_NARROW[dtype] for dtype in _NARROW if dtype in dtypes)
        log.warning("the parameters are %s, but messages are fp32: codec=Dense('bf16') makes them half as long", names)


def warn_of_another_worker(optimizer: Algorithm, loaded: Mapping[str, Any]) -> None:
    """Say that a state was loaded which another worker has saved, where workers have state of their own.

    Args:
        optimizer: that has loaded it.
        loaded: the first parameter group of the state; silent about whose it is in states of thinwire.checkpoint.
    """
    mine, theirs = ([group.get(name) for name in WHOSE] for group in (optimizer.param_groups[0], loaded))
    kept = {"param", *(name for entries in optimizer.own_state.values() for name in entries)}
    own = kept | {"inner"} if hasattr(optimizer, "inner") else kept
    if None in theirs or mine == theirs or own <= optimizer.replicated:
        return
    log.warning(
        "worker %s of %s has loaded the state of worker %s of %s, but each worker has state of its own (%s): save and load one "
        "file per worker, or use thinwire.checkpoint, which also takes over a run of another number of workers",
        *mine,
        *theirs,
        ", ".join(sorted(own - optimizer.replicated)),
    )


def describe_parameters(optimizer: SlotOptimizer) -> dict[str, object]:
    """The parameter groups and tensors, for a fingerprint."""
    skipped = ("params", "in_flight", *COUNTERS, *WHOSE)
    groups = [
        {k: plain(v) for k, v in g.items() if k not in skipped and not k.startswith("_")} | {"tensors": len(g["params"])}
        for g in optimizer.param_groups
    ]
    return {"group": groups, "tensor": [describe(x) for x in optimizer.params()]}


def hashes_of_replicated(optimizer: SlotOptimizer) -> dict[str, object]:
    """What must be bit-equal now: replicated state, before the first step the parameters of any method, frozen parameters."""
    alike = optimizer.replicated_state() or ({"param": optimizer.params()} if optimizer.steps == 0 else {})
    hashes: dict[str, object] = {f"{STARTING}{name!r}": show_hash(values) for name, values in alike.items()}
    return hashes | {FROZEN: show_hash([local(p.detach()) for p in optimizer._frozen])}


def plain(value: object) -> object:
    """A setting as something that JSON can hold and people can read."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else list(value.shape)
    if isinstance(value, dict | list | tuple | str | int | float | bool | type(None)):
        return value
    return repr(value)


# --- Before every step -------------------------------------------------------------------------------------------------


def check_param_groups(optimizer: SlotOptimizer) -> None:
    """Refuse parameters that were added or unfrozen behind the optimizer's back: they would be trained, but never exchanged."""
    name = type(optimizer).__name__
    known = len(optimizer._active) + len(optimizer._frozen)
    there = sum(len(group["params"]) for group in optimizer.param_groups)
    if there != known:
        raise ConfigError(
            f"{there - known} parameters were added to the inner optimizer after {name} was made: "
            f"call add_param_group of {name} instead"
        )
    for p in optimizer._frozen:
        if p.grad is not None:
            raise ConfigError(
                f"a parameter of shape {tuple(p.shape)} has a gradient but was frozen when {name} was made: "
                "unfreeze it first, then make the optimizer"
            )


# Settings whose names begin like this must be finite.
_FINITE = ("lr", "weight_decay", "momentum", "dampening", "beta", "omega", "alpha", "eps")


def check_settings(optimizer: SlotOptimizer) -> None:
    """Refuse a setting that is not a number, before anything changes: one step with an lr of NaN would leave NaN for good.

    A NaN is refused in any setting of a group, an infinity in those that multiply or divide. Others may be infinite:
    optimizers that choose their own step size have limits that are, by default. Tensors on a GPU are not looked at, which
    would make every step wait for it: what they spoil is found by the finite gate of the next round.
    """
    for number, group in enumerate(optimizer.param_groups):
        for name, values in group.items():
            if name == "params":
                continue
            for value in values if isinstance(values, tuple | list) else (values,):
                if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
                    value = value.item()
                if not isinstance(value, float | np.floating) or math.isfinite(value):
                    continue
                if math.isnan(value) or name.startswith(_FINITE):
                    raise ConfigError(
                        f"{name} must be finite, got {values!r} in parameter group {number}: step {optimizer.steps + 1} is "
                        "refused and nothing has changed; look at what sets it, such as a scheduler"
                    )


def unscale_gradients(optimizer: SlotOptimizer) -> None:
    """Undo the scale that a GradScaler sets around `step()`."""
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        inverse = scale.reciprocal()
        for p in optimizer._active:
            if p.grad is not None:
                local(p.grad).mul_(inverse)
