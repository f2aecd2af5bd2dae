"""The files of a checkpoint: names, checksums, tensors in and out, and how a checkpoint becomes a finished one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from thinwire.errors import CheckpointError
from thinwire.sharding.shards import Region

DESCRIPTION = "thinwire.json"
SUMS = "SHA256SUMS"
_FINISHED = re.compile(r"step-(\d{1,15})(?:\.(\d{1,9}))?")
_TENSORS = re.compile(r"(?:replicated|worker\d{1,9})\.\d{1,9}\.safetensors")
_SUM = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9.]{1,64})")
_LONGEST_TEXT = 1 << 28  # bytes of a description; one of 64 workers and 1,500 tensors has 2**24


# --- Folders ---------------------------------------------------------------------------------------------------------------


def finished(folder: Path) -> list[Path]:
    """All finished checkpoints in `folder`, oldest first."""
    if not folder.is_dir():
        return []
    named = [(int(m[1]), int(m[2] or 0), p) for p in folder.iterdir() if (m := _FINISHED.fullmatch(p.name))]
    return [p for *_, p in sorted(named) if (p / DESCRIPTION).is_file()]


def step_of(path: Path) -> int:
    """The step of a finished checkpoint, from its name."""
    match = _FINISHED.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path.name!r} is not the name of a checkpoint, such as step-00000040")
    return int(match[1])


def has_step_name(path: Path) -> bool:
    """Whether a folder has the name of a checkpoint; one that was copied elsewhere may have another."""
    return _FINISHED.fullmatch(path.name) is not None


def publish(aside: Path, target: Path) -> None:
    """Make a written checkpoint the finished one: every byte is on disk before the name changes."""
    for file in aside.iterdir():
        sync(file)
    sync(aside)
    aside.rename(target)
    sync(target.parent)


def free_name(folder: Path, name: str) -> Path:
    """A name for a new checkpoint; another one where the same step was saved before."""
    number = max([-1, *(int(m[2] or 0) for p in folder.glob(f"{name}*") if (m := _FINISHED.fullmatch(p.name)))]) + 1
    return folder / (f"{name}.{number}" if number else name)


def remove_old(mine: Mapping[Path, bool], target: Path, keep: int) -> None:
    """Leave `target` and what is newest before it, each step once; later steps are of a run that was given up.

    The newest whose parameters were finite is left in any case: a run that diverges cannot push it out.

    Args:
        mine: finished checkpoints of this run, oldest first, and whether their parameters were finite; no others are touched.
        target: the one just written.
        keep: how many to leave.
    """
    everything = list(mine)
    so_far = everything[: everything.index(target) + 1]
    newest = {step_of(path): path for path in so_far}
    kept = set(list(newest.values())[-max(1, keep) :])
    kept |= set([path for path in newest.values() if mine[path]][-1:])
    for path in everything:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """Have every byte of a file or folder on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- Checksums -------------------------------------------------------------------------------------------------------------


def sum_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(path: Path, sums: Mapping[str, str]) -> None:
    """Write SHA256SUMS as coreutils do."""
    (path / SUMS).write_text("".join(f"{value}  {name}\n" for name, value in sorted(sums.items())))


def read_sums(path: Path) -> dict[str, str]:
    """The checksums of a checkpoint by file name."""
    lines = _text(path / SUMS, 1 << 24).splitlines()
    found = [_SUM.fullmatch(line) for line in lines]
    if not lines or None in found:
        raise CheckpointError(f"{path} is damaged: {SUMS} is not a list of checksums")
    return {m[2]: m[1] for m in found if m}


def read_verified_text(path: Path, name: str, sums: Mapping[str, str]) -> str:
    """The text of a file whose checksum is right."""
    text = _text(path / name, _LONGEST_TEXT)
    if hashlib.sha256(text.encode()).hexdigest() != sums.get(name):
        raise CheckpointError(f"{path} is damaged: {name} does not have the SHA-256 that {SUMS} has for it")
    return text


def verify(path: Path, names: Iterable[str], sums: Mapping[str, str]) -> None:
    """Raise a `CheckpointError` unless all these files are what they were when they were written."""
    for name in names:
        if not (path / name).is_file():
            raise CheckpointError(f"{path} is damaged: {name} is missing")
        if sum_of(path / name) != sums.get(name):
            raise CheckpointError(f"{path} is damaged: {name} does not have the SHA-256 that {SUMS} has for it")


def _text(path: Path, longest: int) -> str:
    try:
        if path.stat().st_size > longest:
            raise CheckpointError(f"{path.parent} is damaged: {path.name} has {path.stat().st_size} bytes")
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as cause:
        raise CheckpointError(f"{path.parent} is damaged: {path.name}: {cause}") from cause


# --- Tensors ---------------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A part of a stored tensor: in which file, where in the whole tensor it begins, and its shape."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Stored(NamedTuple):
    """A tensor in a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def file_of(owner: str, shard: int) -> str:
    """The file that holds what `owner` ("replicated" or "worker1") has, as its shard with this number has it."""
    return f"{owner}.{shard}.safetensors"


def is_tensor_file(name: str) -> bool:
    """Whether a file has the name of one that holds tensors of a checkpoint."""
    return _TENSORS.fullmatch(name) is not None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], regions: Mapping[str, Region], about: Mapping[str, Any]) -> str:
    """Write one file, and return its checksum.

    Args:
        path: the file.
        tensors: this process's part of each tensor by its key.
        regions: which part of the whole it is.
        about: what the file belongs to: run, step, worker and shard.
    """
    seen: set[int] = set()
    whole = {}
    for key, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous()
        place = flat.untyped_storage().data_ptr()
        whole[key] = flat.clone() if place in seen else flat  # safetensors refuses tensors that share memory
        seen.add(place)
    parts = {key: [region.whole, region.offset] for key, region in regions.items() if region.shape != region.whole}
    save_file(whole, path, metadata={"thinwire": json.dumps({**about, "parts": parts})})
    return sum_of(path)


def describe_tensors(path: Path, names: Iterable[str], about: Mapping[str, Any]) -> dict[str, Stored]:
    """All tensors in these files by their keys, from the headers of the files.

    Args:
        path: the checkpoint.
        names: its files.
        about: what all of them must belong to: run and step.
    """
    found: dict[str, Stored] = {}
    for name in names:
        if not (path / name).is_file():
            raise CheckpointError(f"{name} is not in {path}: all workers must save into one folder that they share")
        with safe_open(path / name, framework="pt") as file:
            parts = _about(file, name, about)["parts"]
            for key in file.keys():  # noqa: SIM118 (no dict)
                part = file.get_slice(key)
                shape = tuple(part.get_shape())
                whole, offset = parts.get(key, (shape, (0,) * len(shape)))
                piece = Piece(name, tuple(offset), shape)
                before = found.get(key)
                dtype = _DTYPES[part.get_dtype()]
                found[key] = Stored(dtype, tuple(whole), (*(before.pieces if before else ()), piece))
    return found


class TensorReader:
    """Reads tensors of a checkpoint from files that were verified before.

    Args:
        path: the checkpoint.
        about: what all files must belong to: run and step.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]):
        self._path, self._about = path, about
        self._open: dict[str, Any] = {}

    def read(self, key: str, stored: Stored, region: Region, prefer: Sequence[str]) -> Tensor:
        """This region of a stored tensor, put together from the pieces that hold it.

        Args:
            key: of the tensor.
            stored: what the description says of it.
            region: the part that is wanted.
            prefer: files to take a piece from where several have the same, as all shards have what is not sharded.
        """
        result = torch.empty(region.shape, dtype=stored.dtype)
        filled = 0
        for piece in pieces_for(stored, region, prefer):
            ours, theirs = _overlap(region, piece)
            values = self._read(key, piece, stored.dtype, theirs)
            result[ours] = values
            filled += values.numel()
        if filled != result.numel():
            raise CheckpointError(f"{self._path} is damaged: its pieces of {key} do not make the whole tensor")
        return result

    def _read(self, key: str, piece: Piece, dtype: torch.dtype, wanted: tuple[slice, ...]) -> Tensor:
        if piece.file not in self._open:
            file = safe_open(self._path / piece.file, framework="pt")
            _about(file, piece.file, self._about)
            self._open[piece.file] = file
        file = self._open[piece.file]
        part = file.get_slice(key)
        if tuple(part.get_shape()) != piece.shape or _DTYPES.get(part.get_dtype()) != dtype:
            raise CheckpointError(f"{self._path} is damaged: {key} in {piece.file} is not as {DESCRIPTION} has it")
        return part[wanted] if wanted else file.get_tensor(key)


def pieces_for(stored: Stored, region: Region, prefer: Sequence[str]) -> list[Piece]:
    """The pieces that hold some of a region, each place once."""
    chosen: dict[tuple[tuple[int, ...], tuple[int, ...]], Piece] = {}
    for piece in stored.pieces:
        place = piece.offset, piece.shape
        if place not in chosen or piece.file in prefer:
            chosen[place] = piece
    return [piece for piece in chosen.values() if all(s.stop > s.start for s in _overlap(region, piece)[0])]


def _overlap(region: Region, piece: Piece) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where a region and a piece overlap: the slices of the one, and of the other."""
    ours, theirs = [], []
    for a, n, b, m in zip(region.offset, region.shape, piece.offset, piece.shape, strict=True):
        start, stop = max(a, b), min(a + n, b + m)
        ours.append(slice(start - a, stop - a))
        theirs.append(slice(start - b, stop - b))
    return tuple(ours), tuple(theirs)


def _about(file: Any, name: str, expected: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says of itself, which must be of the run and step it is read for."""
    about = json.loads((file.metadata() or {}).get("thinwire", "{}"))
    owner, shard, _ = name.split(".")
    for key, value in {**expected, "owner": owner, "shard": int(shard)}.items():
        if about.get(key) != value:
            raise CheckpointError(f"{name} is of {key} {about.get(key)!r}, the checkpoint is of {key} {value!r}")
    return about


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
