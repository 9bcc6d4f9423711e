"""How long is the gradient?

The norm over all elements of all parameters, each counted once: squares are summed in fp64 over
what this rank owns, then over the ranks that share a copy, in rank order.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_CHUNK = 1 << 16
"""Elements that are widened at once: what a processor's second-level cache holds."""


def square_sum(tensors: Iterable[Tensor]) -> float:
    """The sum of all squares, in fp64."""
    total = 0.0
    for tensor in tensors:
        if tensor.is_cuda:
            total += float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2
            continue
        for chunk in torch.split(tensor.reshape(-1), _CHUNK):
            wide = chunk.double()
            total += float(torch.dot(wide, wide))
    return total


def factor(norm: float, limit: float | None) -> float:
    """What gradients are multiplied with so that their norm is at most ``limit``.

    The rule of ``torch.nn.utils.clip_grad_norm_``, 1e-6 included.
    """
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
