"""A pretend accelerator: tensors that say they are on another device, hold CPU memory, and compute with real numbers.

Where no GPU is at hand it shows what a GPU would be asked to do. Within an `Audit` every operation counts as a launch, and
every crossing between host and device is noted with the line of thinwire that asked for it:

    device to host         a copy, such as `.cpu()`
    host to device         a copy, such as `.to(device)`
    scalar read            a number that the host looks at, such as `bool(x)` or `.item()`
    size depends on data   an operation whose result has a size that only the device knows, such as `nonzero`

What a GPU refuses, operands on two devices, is refused here too. Memory is always pageable here: whether a copy that asks not
to block goes on by itself, as it does from and to pinned memory only, cannot be seen.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import thinwire
from thinwire.errors import ConfigError

TO_HOST, TO_DEVICE, SCALAR, SIZE = "device to host", "host to device", "scalar read", "size depends on data"

_SOURCE = Path(thinwire.__file__).parent
_UNSEEN = ("tools/doctor", "links", "payload.py")  # where a crossing is made in the name of whoever called

_LOOKS = {"_local_scalar_dense", "equal", "is_nonzero"}  # give the host a value
_DYNAMIC = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave", "bincount"}
NO_LAUNCH = {
    *("view", "_unsafe_view", "_reshape_alias", "reshape", "alias", "detach", "lift_fresh", "slice", "select", "permute"),
    *("transpose", "t", "expand", "unsqueeze", "squeeze", "split", "split_with_sizes", "unbind", "as_strided", "unfold"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
}


@functools.cache
def device() -> torch.device:
    """The pretend device of this process, made at the first call.

    Raises:
        ConfigError: torch is too old for it.
    """
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as register
    except ImportError:
        raise ConfigError(f"the pretend device needs torch 2.10 or newer, this is {torch.__version__}") from None
    register()  # without a name of its own: torch would then take it for this machine's accelerator
    return torch.device("privateuseone", 0)


class PretendTensor(Tensor):
    """A tensor that is said to be on the pretend device.

    Attributes:
        host: its memory, an ordinary tensor.
    """

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> PretendTensor:
        """A wrapper without memory, with the shape and strides of `host`."""
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset(), "layout": host.layout}
        made = Tensor._make_wrapper_subclass(cls, host.shape, dtype=host.dtype, device=device(), requires_grad=False, **layout)
        made.host = host
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PretendTensor({tuple(self.shape)}, {self.dtype})"

    def untyped_storage(self) -> torch.UntypedStorage:
        """That of its memory."""
        return self.host.untyped_storage()

    def data_ptr(self) -> int:
        """That of its memory."""
        return self.host.data_ptr()

    def numpy(self, **_: Any) -> Any:
        """Refuse, as for any tensor that is not on the CPU."""
        raise TypeError("can't convert a tensor of the pretend device to numpy: copy it to the host with .cpu() first")

    def tolist(self) -> Any:
        """A copy to the host."""
        return self.cpu().tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation that no `Audit` sees."""
        return _run(None, func, args, kwargs or {})


def on_device(tensor: Tensor) -> PretendTensor:
    """A copy of a tensor on the pretend device, which no `Audit` counts."""
    return PretendTensor(tensor.detach().clone())


def on_host(tensor: Tensor) -> Tensor:
    """The values of a tensor on the host, which no `Audit` counts; not a copy."""
    return tensor.detach().host if isinstance(tensor, PretendTensor) else tensor  # type: ignore[union-attr]


@dataclass(frozen=True)
class Crossing:
    """One crossing of the border between host and device.

    Attributes:
        kind: of the four above.
        where: file and line of thinwire, as "core/rounds.py:123"; "?" outside of it.
        nbytes: how much crossed.
        blocking: whether the host waited for the device.
    """

    kind: str
    where: str
    nbytes: int
    blocking: bool = True

    @property
    def file(self) -> str:
        """Where, without the line."""
        return self.where.partition(":")[0]


class Audit(TorchDispatchMode):
    """Within it, launches on the pretend device are counted and crossings are noted; on the thread that entered it.

    Attributes:
        crossings: in the order in which they were made.
        launches: by operation.
        places: launches by file and line.
    """

    def __init__(self):
        """Nothing has been seen."""
        super().__init__()
        self.crossings: list[Crossing] = []
        self.launches: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and see what it does."""
        return _run(None if self._paused else self, func, args, kwargs or {})

    @contextmanager
    def paused(self) -> Iterator[Self]:
        """Within it nothing is counted: for what no device would be asked to do."""
        before, self._paused = self._paused, True
        try:
            yield self
        finally:
            self._paused = before

    def note(self, kind: str, nbytes: int, *, blocking: bool = True) -> None:
        """Note a crossing."""
        if not self._paused:
            self.crossings.append(Crossing(kind, _place(), nbytes, blocking))

    def launched(self, name: str) -> None:
        """Count a launch."""
        self.launches[name] += 1
        self.places[_place()] += 1

    @property
    def blocking(self) -> int:
        """How often the host waited for the device."""
        return sum(crossing.blocking for crossing in self.crossings)

    def by_file(self, *, blocking: bool | None = True) -> dict[str, int]:
        """How many crossings each file has asked for.

        Args:
            blocking: only those that block, or only those that do not; None for both.
        """
        wanted = [c.file for c in self.crossings if blocking is None or c.blocking == blocking]
        return dict(sorted(Counter(wanted).items()))


def current_audit() -> Audit | None:
    """The innermost `Audit` that this thread is within."""
    return next((mode for mode in reversed(_get_current_dispatch_mode_stack()) if isinstance(mode, Audit)), None)


def _place() -> str:
    """File and line of thinwire that the current operation belongs to: the innermost that acts for itself."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if name := _name_of(frame.f_code.co_filename):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@functools.cache
def _name_of(filename: str) -> str:
    """A file of thinwire that acts for itself, as it is shown; empty for all others."""
    path = Path(filename)
    name = str(path.relative_to(_SOURCE)) if path.is_relative_to(_SOURCE) else ""
    return "" if name.startswith(_UNSEEN) else name


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _run(audit: Audit | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the memory of its operands."""
    operands: list[Tensor] = []
    raw_args, raw_kwargs = _mapped(lambda t: operands.append(t) or _memory(t), (args, kwargs))
    mine = [t for t in operands if isinstance(t, PretendTensor)]
    target = kwargs.get("device")
    target = None if target is None else torch.device(target)
    if not mine and (target is None or target.type != device().type):
        return func(*args, **kwargs)
    base = func.overloadpacket.__name__.removesuffix("_")
    leaves = _crossing(audit, base, args, kwargs, mine, target)
    if audit is not None and base not in NO_LAUNCH | _LOOKS:
        audit.launched(base)
    if not leaves:
        _refuse_two_devices(func, base, operands)
    known = {id(t.host): t for t in mine}
    if target is not None:
        raw_kwargs["device"] = target if target.type == "meta" else torch.device("cpu")
    result = func(*raw_args, **raw_kwargs)

    def wrap(found: Tensor) -> Tensor:
        if id(found) in known:
            return known[id(found)]
        return found if leaves else PretendTensor(found)

    return _mapped(wrap, result)


def _memory(tensor: Tensor) -> Tensor:
    return tensor.host if isinstance(tensor, PretendTensor) else tensor


def _mapped(function: Callable[[Tensor], Any], values: Any) -> Any:
    """Apply a function to all tensors of nested arguments or results; torch's own is made for more kinds, and takes longer."""
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, dict):
        return {key: _mapped(function, value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)([_mapped(function, value) for value in values])
    return values


def _crossing(
    audit: Audit | None,
    base: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mine: list[PretendTensor],
    target: torch.device | None,
) -> bool:
    """Note what crosses in an operation; whether its result is on the host."""
    note = (lambda *_, **__: None) if audit is None else audit.note
    if base in ("_to_copy", "copy"):
        source = args[0] if base == "_to_copy" else args[1]
        there = isinstance(source, PretendTensor)
        goes = (target is None and there) or (target is not None and target.type == device().type)
        if base == "copy":
            goes = isinstance(args[0], PretendTensor)
        asynchronous = bool(kwargs.get("non_blocking") or (base == "copy" and len(args) > 2 and args[2]))
        if there != goes and not (target is not None and target.type == "meta"):
            note(TO_HOST if there else TO_DEVICE, _nbytes(source), blocking=not asynchronous)
        return not goes
    if base in _LOOKS:
        note(SCALAR, mine[0].element_size())
        return True
    if base in _DYNAMIC and not (base == "repeat_interleave" and kwargs.get("output_size") is not None):
        note(SIZE, 8)
    if base in ("index", "index_put", "_index_put_impl"):
        picked = [i for i in args[1] if isinstance(i, Tensor)]
        if any(i.dtype in (torch.bool, torch.uint8) for i in picked):
            note(SIZE, 8)
        for i in picked:
            if not isinstance(i, PretendTensor):
                note(TO_DEVICE, _nbytes(i))
    return target is not None and target.type == "meta"


def _refuse_two_devices(func: Any, base: str, operands: list[Tensor]) -> None:
    """Raise what a GPU would: only single numbers, and indices, may come from the host."""
    odd = [tuple(t.shape) for t in operands if not isinstance(t, PretendTensor) and t.dim() > 0 and not t.is_meta]
    if odd and base not in ("lift_fresh", "copy", "_to_copy", "index", "index_put", "_index_put_impl"):
        raise RuntimeError(f"{func}: operands on two devices, of shape {odd[0]} on the host, at {_place()}")
