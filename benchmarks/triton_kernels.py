"""Triton kernels compiled ahead of time for A100 (sm_80) and H100 (sm_90): registers, spills, shared memory.

    pip install "thinwire[triton]"
    python -m benchmarks.triton_kernels                         # all kernels, some minutes; adds a row to records/triton.jsonl
    python -m benchmarks.triton_kernels --only encode --k 32 --no-record

No GPU is needed; nothing is measured on one.
"""

from __future__ import annotations

import argparse
import json
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
from thinwire.kernels.triton import SETTINGS, blocks, checksum, envelope, gate, received, rows
from thinwire.kernels.triton.start import STEP, STRETCH

CARDS = (80, 90)
WORKERS = 8
_ROW = {32: (6, 95, 12), 128: (4, 383, 48)}  # by k: low bits, bits and bytes of a row of Elias-Fano

_TABLES = {"places": "*i32", "shapes": "*i64", "addresses": "*i64"}
_GROUPS = {"groups": "*i32", "offsets": "*i64", "addresses": "*i64"}
_AT = {"low_at": "i32", "scale_at": "i32", "sign_at": "i32"}
_SENT = {"entries": "*i16", "scales": "*fp32"}
_NUMBERS = dict.fromkeys(("decay", "scale", "b2", "rest", "root", "eps"), "fp32")
_MEAN = {"weights": "*fp32", "factors": "*fp32", "squares": "*fp64", "total": "fp32", "lr": "fp32"}
_RAW = {"raw": "*u8", "stride": "i64"}
_SEGMENTS = {**_RAW, **dict.fromkeys(("length", "hole", "segments"), "i32")}
_SEGMENTS |= dict.fromkeys(("table", "images", "states"), "*i32")
_JOIN = dict.fromkeys(("states", "images", "ahead", "out"), "*i32") | dict.fromkeys(("segments", "tiles", "constant"), "i32")
_OPEN = {**_RAW, "senders": "*i64", "frames": "*i64", "parts": "i32", "sums": "*i32", "wrong": "*u8", "invalid": "*u8"}
_OPEN |= {"flags": "*i64", "weights": "*fp32", "states": "*i64"}
_OPEN |= dict.fromkeys(("first", "fingerprint", "round_number", "nbytes"), "i64")

Described = tuple[str, Any, dict[str, str], dict[str, Any]]  # name, function, types of the arguments, constants


def kernels_of_blocks(k: int) -> Iterator[Described]:
    """As a round of DeMo has them."""
    low, bits, row = _ROW[k]
    common = {**_TABLES, "basis": "*fp32"}
    encode = {**common, "tensors": "i32", "clip_ptr": "*fp32", **_SENT, "section": "*u8", **_AT, **_NUMBERS}
    how = {"ADD": True, "KEPT": True, "STORED": True, "CLIP": False, "DTYPE": tl.float32, "K": k, "KP": k, "LOW": low}
    how |= {"ROW": row, "TILE": min(32, triton.next_power_of_2(row)), "PRECISION": SETTINGS["forward"]}
    yield "encode", blocks.encode, encode, how | {"WHITEN": True}
    yield "encode, no whitening", blocks.encode, encode, how | {"WHITEN": False}
    how = {"K": k, "LOW": low, "BITS": bits, "ROW": row, "BP": triton.next_power_of_2(8 * row)}
    yield "read", received.read, {**_RAW, "blocks": "i32", **_SENT, "wrong": "*u8", **_AT}, how
    how = {"MESSAGES": WORKERS, "SENDERS": True, "WEIGHTED": False, "FACTORED": True, "STEP": True, "SIGN": False}
    how |= {"DTYPE": tl.float32, "K": k, "KP": k, "PRECISION": SETTINGS["inverse"]}
    combine = {**common, **_SENT, **_MEAN, "blocks": "i32"}
    yield "combine: step", received.combine, combine, how | {"SQUARES": False}
    yield "combine: squares", received.combine, combine, how | {"SQUARES": True}
    yield "take", received.take, {**_TABLES, **_SENT, "scale": "fp32"}, {"K": k, "KP": k}


def other_kernels() -> Iterator[Described]:
    """Those that do not depend on k."""
    encode = {
        **_GROUPS,
        "tensors": "i32",
        "clip_ptr": "*fp32",
        "scales": "*fp32",
        "section": "*u8",
        "sign_at": "i32",
        **_NUMBERS,
    }
    how = {"ADD": True, "KEPT": True, "STORED": True, "WHITEN": True, "CLIP": False, "DTYPE": tl.float32}
    yield "encode_rows", rows.encode_rows, encode, how
    yield "read_rows", rows.read_rows, {**_RAW, "many": "i32", "scales": "*fp32", "wrong": "*u8"}, {}
    how = {"MESSAGES": WORKERS, "WEIGHTED": False, "FACTORED": True, "SQUARES": False, "STEP": True, "SIGN": False}
    yield "combine_rows", rows.combine_rows, {**_GROUPS, **_RAW, **_MEAN, "sign_at": "i32"}, how | {"DTYPE": tl.float32}
    yield "take_rows", rows.take_rows, {**_GROUPS, "section": "*u8", "sign_at": "i32", "scale": "fp32"}, {}
    yield "crc_segments", checksum.crc_segments, _SEGMENTS, {}
    yield "crc_join", checksum.crc_join, _JOIN, {"TILE": 128}
    stretches = {"places": "*i32", "addresses": "*i64", "tensors": "i32", "nbytes": "*i64", "refused": "*u8"}
    yield "restore", gate.restore, stretches, {"SIZE": STRETCH, "STEP": STEP}
    yield "open_envelopes", envelope.open_envelopes, _OPEN, {"HEADER": 56, "PART": 32, "INVALID": 1, "KNOWN": 3}


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
        command = [
            get_ptxas(card).path,
            "-v",
            f"--gpu-name=sm_{card}{'a' if card == 90 else ''}",
            path,
            "-o",
            Path(folder, "out"),
        ]
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
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--no-record", action="store_true", help="do not add a row to the record")
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    keys = ("kernel", "k", "sm", "warps", "registers", "spilled B", "shared B", "barriers")
    table = Table(*keys)
    described = [(k, one) for k in arguments.k for one in kernels_of_blocks(k)] + [(0, one) for one in other_kernels()]
    for k, (name, kernel, signature, constants) in described:
        for card in arguments.cards if name.startswith(arguments.only) else ():
            figures = compiled(kernel, signature, constants, card, SETTINGS["warps"].get(kernel.__name__, 1))
            found.append({"kernel": name, "function": kernel.__name__, "k": k, "sm": card, **figures})
            table.add_row(*(str(found[-1][key] or "") if key == "k" else str(found[-1][key]) for key in keys))
    if arguments.json:
        print(json.dumps(found))
    else:
        Console().print(table)
    if not arguments.no_record:
        append("triton", {"triton": triton.__version__, "workers": WORKERS, "kernels": found})


if __name__ == "__main__":
    main()
