"""Trains a small transformer on generated text, at any ZeRO stage and on any number of ranks.

::

    torchrun --nproc-per-node 8 examples/train.py --stage 3 --folder run
    torchrun --nproc-per-node 2 examples/train.py --stage 2 --folder run --resume

The second line goes on from the newest checkpoint of the first. Which samples a step sees, which
numbers dropout draws and in which order gradients are summed depends on neither the stage nor the
number of ranks, as long as that is a power of two: every loss is the same, bit for bit.

It saves while it trains. At the end the whole weights lie in ``model.safetensors``. Started by
``torchrun --max-restarts 3`` and with ``--resume``, it survives ranks that are killed.
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

import reshard
from reshard.engine import Precision, ZeroEngine, rounds
from reshard.engine.data import Samples, seed_of
from reshard.engine.keep import checkpoints, latest
from reshard.engine.load import load
from reshard.engine.save import save

SEED = 7
LENGTH = 32
"""Characters of a sample."""
SAMPLES = 4
"""Samples of a micro-batch."""
MICRO_BATCHES = 8
"""Of a step, on all ranks together: so a step is the same work on 1, 2, 4 or 8 of them."""
PRECISIONS = {"fp32": Precision(), "bf16": Precision(param=torch.bfloat16)}

# -- the text -------------------------------------------------------------------------------------

WORDS = "the a/small old red/cat dog bird/sees hears likes/one no/green cold round/tree house river"
"""What each word of a sentence is chosen from."""


def text(count: int) -> Tensor:
    """Made-up sentences as samples, [count, LENGTH + 1]; each character is a number below 128."""
    chance = random.Random(SEED)
    need, written = count * LENGTH + 1, ""
    while len(written) < need:
        written += " ".join(chance.choice(some.split()) for some in WORDS.split("/")) + ". "
    return torch.tensor(list(written[:need].encode("ascii"))).unfold(0, LENGTH + 1, LENGTH)


# -- the model ------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """Takes samples and gives the loss of predicting each next character."""

    def __init__(self, width: int = 64, heads: int = 4, blocks: int = 4) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(128, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128, bias=False)
        nn.init.normal_(self.embed.weight, std=0.05)
        self.head.weight = self.embed.weight

    def forward(self, samples: Tensor) -> Tensor:
        x = self.embed(samples[:, :-1]) + self.place.weight
        for block in self.blocks:
            x = block(x)
        guess = self.head(self.norm(x)).float()
        return cross_entropy(guess.flatten(0, 1), samples[:, 1:].flatten())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, biases and norms don't."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


# -- the training ---------------------------------------------------------------------------------


def main() -> None:
    options = parse()
    rounds.start("gloo")  # init_process_group, but also after a restart by torchrun
    torch.set_num_threads(1)  # sums inside a layer depend on the number of threads
    rank, world = dist.get_rank(), dist.get_world_size()
    if MICRO_BATCHES % world:
        raise SystemExit(f"{world} ranks can't share {MICRO_BATCHES} micro-batches evenly")
    say(f"world size {world}, ZeRO stage {options.stage}, {options.precision}")

    torch.manual_seed(SEED)
    engine = ZeroEngine(
        Transformer(),
        lambda groups: AdamW(groups, lr=3e-3),
        groups=groups,
        stage=options.stage,
        precision=PRECISIONS[options.precision],
    )
    scheduler = CosineAnnealingLR(engine.optimizer, options.steps)
    samples = text(1000)
    data = Samples(len(samples), SAMPLES, rank=rank, world=world, seed=SEED)
    beside: dict[str, Any] = {"scheduler": scheduler, "data": data}

    if source := resume_from(options):
        loaded = load(engine, source, **beside)
        say(f"goes on from {loaded.path.name}, which was saved after step {loaded.step}")
    while (step := engine.counters["step"] + 1) <= options.until:
        loss = train(engine, samples, data, step)
        scheduler.step()
        say(f"step {step:>3}  loss {loss:.9f}")  # nine decimals tell any two such means apart
        if step % options.save_every == 0 or step == options.until:
            path = options.folder / f"step-{step}"
            save(engine, path, **beside, blocking=False, keep_last=options.keep_last)

    engine.saving.settle()  # the last save is written beside the training
    target = options.folder / "model.safetensors"
    if step > options.steps and rank == 0 and not target.exists():
        reshard.consolidate(latest(options.folder), target)
        say(f"the whole weights are in {target.name}")
    dist.destroy_process_group()


def train(engine: ZeroEngine, samples: Tensor, data: Samples, step: int) -> float:
    """Take a step; returns the mean loss of all ranks' micro-batches."""
    losses = []
    for turn in range(MICRO_BATCHES // engine.size):
        torch.manual_seed(seed_of(SEED, step, turn * engine.size + engine.rank))  # for dropout
        loss = engine(samples[torch.from_numpy(data.take())])
        engine.backward(loss)
        losses.append(loss.item())
    engine.step()
    return math.fsum(map(math.fsum, engine.exchange(losses, "losses"))) / MICRO_BATCHES


def resume_from(options: argparse.Namespace) -> Path | None:
    """The checkpoint to go on from; ``None`` at the very beginning."""
    if options.resume != "latest":
        return options.resume and Path(options.resume)
    return latest(options.folder) if checkpoints(options.folder) else None


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=3)
    parser.add_argument("--steps", type=int, default=20, help="of the whole training")
    parser.add_argument("--until", type=int, help="stop and save after this step")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--folder", type=Path, default=Path("run"), help="for checkpoints")
    parser.add_argument("--save-every", type=int, default=5, metavar="N", help="steps")
    parser.add_argument("--keep-last", type=int, default=3, metavar="N", help="checkpoints")
    parser.add_argument(
        "--resume", nargs="?", const="latest", metavar="PATH",
        help="go on from a checkpoint of any format; without PATH from the newest in the folder",
    )  # fmt: skip
    options = parser.parse_args()
    options.until = min(options.until or options.steps, options.steps)
    options.folder.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    main()
