"""Which model is trained? A plain transformer in fp32, and noise for it to learn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a model and of a micro-batch."""

    layers: int
    width: int
    vocabulary: int
    context: int
    sequences: int


SIZES = {
    "full": Size(layers=12, width=512, vocabulary=8192, context=128, sequences=1),
    "long": Size(layers=12, width=512, vocabulary=8192, context=128, sequences=3),
    "small": Size(layers=4, width=128, vocabulary=512, context=64, sequences=2),
    "tiny": Size(layers=1, width=16, vocabulary=32, context=8, sequences=1),
}
"""``full`` has 46.3 million parameters; ``tiny`` only warms a process up."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.attend(self.before(x)).chunk(3, -1)
        )
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.join(found.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """Takes tokens, returns the loss of telling the next one."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(2 * size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.last = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(
            self.head(self.last(x)).flatten(0, 1), tokens.roll(-1, 1).flatten()
        )


def build(size: Size) -> Transformer:
    """The same model in every process."""
    torch.manual_seed(0)
    return Transformer(size)


def batch(size: Size, step: int, rank: int) -> Tensor:
    """A micro-batch, of shape [sequences, context]."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(size.vocabulary, (size.sequences, size.context), generator=generator)
