"""How long a message is, and what a worker sends in a round, for the tensors of GPT-2 124M; nothing is encoded."""

import torch

from thinwire import parse_codec
from thinwire.network import ring_traffic

d = 768
layer = [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
like = [torch.empty(shape, device="meta") for shape in [(50304, d), (1024, d), *(12 * layer), (d,), (d,)]]
wires = ["fp32", "bf16", "int8", "fp4", "2-bit", "1-bit"]
wires += [f"DCT(64) >> TopK(32) >> {v}" for v in ("Float('fp32')", "Float('bf16')", "Int8()", "Fp4()", "TwoBit()", "Sign()")]
wires += ["DCT(64) >> TopK(8) >> Sign()", "TopK(64) >> TwoBit()", "RandomK(0.05) >> Float('bf16')"]
print(f"{'codec':36} {'exchange':8} {'message':>11} {'2 workers':>13} {'16 workers':>13}")
for wire in wires:
    codec = parse_codec(wire)
    n, op = codec.nbytes(like), "mean" if codec.linear else "gather"
    sent = [f"{ring_traffic(op, [n] * workers, rank=0).sent:13,}" for workers in (2, 16)]
    print(f"{wire:36} {op:8} {n:11,}", *sent)
