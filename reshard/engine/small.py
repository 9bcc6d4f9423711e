"""How do ranks agree on small things? They gather what everyone says, then all reckon alike."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reshard.engine.counter import pairwise_sum

if TYPE_CHECKING:
    from reshard.engine.transport import Op, Transport

__all__ = ["agree", "exchange"]


@torch.no_grad()
def agree(transport: Transport, values: Tensor, op: Op, label: str) -> Tensor:
    """Combine a small tensor over all ranks by gathering it; sums are taken in rank order."""
    n, ranks = values.numel(), transport.size
    every = values.new_empty(ranks * n)
    every[transport.rank * n : (transport.rank + 1) * n] = values.reshape(-1)
    transport.gather(every, range(0, ranks * n + 1, n) if n else [0] * (ranks + 1), label).wait()
    parts = list(every.view(ranks, n))
    if op == "max":
        return every.view(ranks, n).amax(0).view(values.shape)
    return pairwise_sum(parts).view(values.shape)


def exchange(
    transport: Transport, data: Any, label: str, *, device: torch.device | None = None
) -> list[Any]:
    """Give every rank what each has said: first the lengths, then the JSON texts."""
    said = json.dumps(data).encode()
    lengths = torch.zeros(transport.size, dtype=torch.int64, device=device)
    lengths[transport.rank] = len(said)
    transport.gather(lengths, range(transport.size + 1), f"{label}: lengths").wait()
    bounds = [0]
    for length in lengths.tolist():
        bounds.append(bounds[-1] + length)
    texts = torch.zeros(bounds[-1], dtype=torch.uint8, device=device)
    own = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    texts[bounds[transport.rank] : bounds[transport.rank + 1]] = own
    transport.gather(texts, bounds, label).wait()
    raw = bytes(texts.cpu().numpy())
    return [json.loads(raw[a:b]) for a, b in pairwise(bounds)]
