"""Triton kernels compiled ahead of time for A100 (sm_80) and H100 (sm_90): registers, spills and shared memory. No GPU is needed.

    pip install "thinwire[triton]"
    python -m benchmarks.triton_kernels                         # all kernels, some minutes; adds a row to records/triton.jsonl
    python -m benchmarks.triton_kernels --only encode --k 32 --no-record
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

if os.environ.get("TRITON_INTERPRET", "0") == "1":
    raise SystemExit("TRITON_INTERPRET=1 runs kernels in the interpreter and compiles none: unset it")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from benchmarks.record import append
from thinwire.kernels.triton import SETTINGS, blocks, checksum, received

CARDS = (80, 90)
WORKERS = 8
_ROW = {32: (6, 95, 12), 128: (4, 383, 48)}  # by k: low bits, bits and bytes of a row of Elias-Fano

_TABLES = {"places": "*i32", "shapes": "*i64", "addresses": "*i64"}
_AT = {"low_at": "i32", "scale_at": "i32", "sign_at": "i32"}
_SENT = {"entries": "*i16", "scales": "*fp32"}
_NUMBERS = {name: "fp32" for name in ("decay", "scale", "b2", "rest", "root", "eps")}


_SEGMENTS = {"raw": "*u8", "stride": "i64", **{name: "i32" for name in ("length", "hole", "segments")}}
_SEGMENTS |= {name: "*i32" for name in ("table", "images", "states")}
_JOIN = {name: "*i32" for name in ("states", "images", "ahead", "out")} | {name: "i32" for name in ("segments", "tiles", "constant")}


def kernels(k: int) -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any]]]:
    """Name, function, types of the arguments and constants, as a round of DeMo has them."""
    low, bits, row = _ROW[k]
    common = {**_TABLES, "basis": "*fp32"}
    encode = {**common, "tensors": "i32", "clip_ptr": "*fp32", **_SENT, "section": "*u8", **_AT, **_NUMBERS}
    how = {"ADD": True, "KEPT": True, "STORED": True, "CLIP": False, "DTYPE": tl.float32, "K": k, "KP": k, "LOW": low}
    how |= {"ROW": row, "TILE": min(32, triton.next_power_of_2(row)), "PRECISION": SETTINGS["forward"]}
    yield "encode", blocks.encode, encode, how | {"WHITEN": True}
    yield "encode, no whitening", blocks.encode, encode, how | {"WHITEN": False}
    read = {"raw": "*u8", "stride": "i64", "blocks": "i32", **_SENT, "wrong": "*u8", **_AT}
    how = {"K": k, "LOW": low, "BITS": bits, "ROW": row, "BP": triton.next_power_of_2(8 * row)}
    yield "read", received.read, read, how
    combine = {**common, **_SENT, "weights": "*fp32", "factors": "*fp32", "squares": "*fp64"}
    combine |= {"blocks": "i32", "total": "fp32", "lr": "fp32"}
    how = {"MESSAGES": WORKERS, "SENDERS": True, "WEIGHTED": False, "FACTORED": True, "STEP": True, "SIGN": False}
    how |= {"DTYPE": tl.float32, "K": k, "KP": k, "PRECISION": SETTINGS["inverse"]}
    yield "combine: step", received.combine, combine, how | {"SQUARES": False}
    yield "combine: squares", received.combine, combine, how | {"SQUARES": True}
    yield "crc_segments", checksum.crc_segments, _SEGMENTS, {}
    yield "crc_join", checksum.crc_join, _JOIN, {"TILE": 128}
    yield "take", received.take, {**_TABLES, **_SENT, "scale": "fp32"}, {"K": k, "KP": k}


def compiled(kernel: Any, signature: dict[str, str], constants: dict[str, Any], card: int, warps: int) -> dict[str, Any]:
    """What ptxas says of a kernel."""
    names = [*signature, *constants]
    assert sorted(names) == sorted(kernel.arg_names), set(names) ^ set(kernel.arg_names)
    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)
    code = made.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(code)
        command = [get_ptxas(card).path, "-v", f"--gpu-name=sm_{card}{'a' if card == 90 else ''}", path, "-o", Path(folder, "out")]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = {"registers": _number(r"Used (\d+) registers", told), "spilled B": _number(r"(\d+) bytes spill stores", told)}
    return found | {"shared B": made.metadata.shared, "barriers": code.count("bar.sync"), "warps": warps}


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return 0 if found is None else int(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=int, nargs="+", choices=list(_ROW), default=list(_ROW), help="entries of a block")
    parser.add_argument("--cards", type=int, nargs="+", default=list(CARDS), help="compute capabilities (default: 80 90)")
    parser.add_argument("--only", default="", help="kernels whose name begins so")
    parser.add_argument("--no-record", action="store_true", help="do not add a row to the record")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    table = Table("kernel", "k", "sm", "warps", "registers", "spilled B", "shared B", "barriers")
    for k in arguments.k:
        for name, kernel, signature, constants in kernels(k):
            if not name.startswith(arguments.only):
                continue
            for card in arguments.cards:
                found = compiled(kernel, signature, constants, card, SETTINGS["warps"].get(kernel.__name__, 1))
                rows.append({"kernel": name, "k": k, "sm": card, **found})
                keys = ("kernel", "k", "sm", "warps", "registers", "spilled B", "shared B", "barriers")
                table.add_row(*(str(rows[-1][key]) for key in keys))
    Console().print(table)
    if not arguments.no_record:
        append("triton", {"triton": triton.__version__, "workers": WORKERS, "kernels": rows})


if __name__ == "__main__":
    main()
