"""A small GPT on bytes, whose attention is a function that the caller hands in.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), section 2.3: pre-norm blocks, a
last norm, residual projections started smaller by the square root of their number, tied embeddings. No biases: that
of the keys moves all scores of a row alike, so its gradient is rounding noise, which Adam would turn into steps of
full size.

Holds always: equal seeds give equal weights, on every device: the numbers are drawn on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Causal attention over q, k, v (B, H, N, d) -> (B, H, N, d).
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

BYTES = 256  # the vocabulary


@dataclass(frozen=True, kw_only=True)
class Size:
    """What decides the network."""

    layers: int = 2
    heads: int = 2
    head_dim: int = 64
    context: int = 256  # tokens that a row attends to

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


class _Block(nn.Module):
    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.size, self.attend = size, attend
        self.before_attention = nn.LayerNorm(size.width, bias=False)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.before_mlp = nn.LayerNorm(size.width, bias=False)
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, width)
        b, n, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(b, n, 3, self.size.heads, self.size.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, N, d), strided as most models leave it
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(b, n, width))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x))))


class Gpt(nn.Module):
    """The network. `forward` is the mean cross entropy (nats) of the next byte."""

    def __init__(self, size: Size, attend: Attend, seed: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(_Block(size, attend) for _ in range(size.layers))
        self.last_norm = nn.LayerNorm(size.width, bias=False)
        draw = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                deviation = 0.02 / (2 * size.layers) ** 0.5 if residual else 0.02
                with torch.no_grad():
                    weight.normal_(0.0, deviation, generator=draw)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, N + 1) int64
        read, wanted = tokens[:, :-1], tokens[:, 1:]
        x = self.embed(read) + self.position.weight[: read.shape[1]]
        for block in self.blocks:
            x = block(x)
        scores: Any = functional.linear(self.last_norm(x), self.embed.weight).double()  # (B, N, 256)
        return functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())
