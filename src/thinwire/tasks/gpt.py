"""A small GPT, top to bottom.

Pre-norm blocks, rotary positions, causal attention, a GELU MLP four times as wide, and a head tied to the embedding.
There are no biases: every parameter is either a matrix or the weight of a norm, which is the split that
matrix optimizers such as Muon ask for.

In the shape comments B is the batch, T the sequence length, C the width, H the heads, D = C / H, V the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    Attributes:
        vocab: number of different tokens.
        context: longest sequence.
        layers: number of blocks.
        width: length of the vector that stands for one token.
        heads: attention heads; divides `width` into parts of even length.
    """

    vocab: int = 256
    context: int = 128
    layers: int = 4
    width: int = 128
    heads: int = 4

    def __post_init__(self) -> None:
        """Refuse a shape that cannot be built."""
        for field in ("vocab", "context", "layers", "width", "heads"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        # Rotary positions turn pairs of features, so a head has an even number of them.
        if self.width % (2 * self.heads):
            raise ValueError(f"width must be a multiple of 2 * heads = {2 * self.heads}, got {self.width}")


SIZES: dict[str, GPTConfig] = {
    "pico": GPTConfig(layers=2, width=64, heads=2, context=64),  # 0.1M
    "micro": GPTConfig(layers=2, width=128, heads=4, context=128),  # 0.4M
    "nano": GPTConfig(layers=4, width=128, heads=4, context=128),  # 0.8M
    "small": GPTConfig(layers=4, width=256, heads=4, context=128),  # 3.2M
    "medium": GPTConfig(layers=6, width=384, heads=6, context=256),  # 10.7M
    "124m": GPTConfig(layers=12, width=768, heads=12, context=1024, vocab=50257),  # GPT-2 small
}


def rotary_angles(*, context: int, features: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position * frequency, each [context, features / 2]."""
    frequency = 10000.0 ** (-torch.arange(0, features, 2, dtype=torch.float32) / features)
    angle = torch.outer(torch.arange(context, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(
    x: Tensor,  # [B, H, T, D]
    cos: Tensor,  # [T, D / 2]
    sin: Tensor,  # [T, D / 2]
) -> Tensor:
    """Turn each pair (x[i], x[i + D / 2]) by an angle that grows with the position."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal self-attention: each token looks at itself and at what came before."""

    def __init__(self, config: GPTConfig):
        """Make the projections."""
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(
        self,
        x: Tensor,  # [B, T, C]
        cos: Tensor,  # [T, D / 2]
        sin: Tensor,  # [T, D / 2]
    ) -> Tensor:
        """Mix tokens; the result has the shape of `x`."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)  # [B, H, T, D]
            for part in self.qkv(x).split(width, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    """The same two-layer network on every token."""

    def __init__(self, config: GPTConfig):
        """Make the projections."""
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, C]
        """Mix features; the result has the shape of `x`."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention, then MLP, each added to what came in."""

    def __init__(self, config: GPTConfig):
        """Make both parts and their norms."""
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x [B, T, C]
        """One layer; the result has the shape of `x`."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Predicts the next token at every position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig):
        """Make the model with random weights from torch's global generator."""
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        cos, sin = rotary_angles(context=config.context, features=config.width // config.heads)
        # They follow from the config, so they have no place in a checkpoint.
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._draw_weights()

    def _draw_weights(self) -> None:
        """GPT-2's initial weights."""
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue  # norms start at one
            # Each block adds twice to the residual stream; shrunk like this the stream does not grow with depth.
            last = name.endswith(("attention.out.weight", "mlp.down.weight"))
            nn.init.normal_(weight, std=0.02 / math.sqrt(2 * self.config.layers) if last else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # [B, T] int64
        """Scores of the next token at every position: [B, T, V]."""
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(f"a sequence has at most {self.config.context} tokens, got {length}")
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embed(tokens)  # [B, T, C]
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.linear(self.norm(x), self.embed.weight)
