"""Do transformers' own models load what zreshard consolidates, weight for weight?

For a model with tied weights (GPT-2) and one without (Llama), each in one file and in shards: the
model is trained a few steps with AdamW and saved as a training script saves it, resharded by way
of the native format, and consolidated into the folder of a configuration. ``from_pretrained`` must
then find every weight and nothing else, and give the same logits, bit for bit. The other way, a
folder that ``save_pretrained`` wrote becomes a native checkpoint and a folder again.

    python interop/transformers_load.py --zreshard "python -m reshard.cli" [--work DIR]

It runs where transformers and torch are installed; see README.md.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel
from transformers.utils import logging

CONFIGS = {
    "tied": GPT2Config(n_layer=3, n_embd=48, n_head=4, vocab_size=211, n_positions=32),
    "untied": LlamaConfig(
        num_hidden_layers=3, hidden_size=48, intermediate_size=100, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=211, tie_word_embeddings=False,
    ),
}  # fmt: skip
SHARD = "100KB"


def trained(config: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model after a few steps, and its optimizer's state."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        tokens = torch.randint(config.vocab_size, (2, 16))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return model.eval(), optimizer.state_dict()


def logits(model: torch.nn.Module) -> torch.Tensor:
    """What it says of some tokens."""
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(20).reshape(2, 10)).logits
    return found


def differences(model: PreTrainedModel, folder: Path) -> list[str]:
    """What is wrong with a folder that should hold that model."""
    again, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    found = [f"{what}: {sorted(keys)[:3]}" for what, keys in info.items() if keys]
    mine, its = model.state_dict(), again.state_dict()
    found += [f"{name} differs" for name in mine if not torch.equal(mine[name], its[name])]
    if mine.keys() != its.keys():
        found.append(f"other names: {sorted(mine.keys() ^ its.keys())[:3]}")
    if not torch.equal(logits(model), logits(again.eval())):
        found.append("the logits differ")
    return found


def arguments(text: str | None) -> tuple[list[str], Path]:
    """The words of the command line: how zreshard is called, and where files are made."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--zreshard", default="zreshard", help="the command")
    parser.add_argument("--work", type=Path, help="keep the files here")
    given = parser.parse_args()
    return shlex.split(given.zreshard), given.work or Path(tempfile.mkdtemp())


def main() -> int:
    """Run all cases; the exit code is 0 if all are the same."""
    command, work = arguments(__doc__)
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    def run(*words: object) -> None:
        subprocess.run([*command, *map(str, words), "--quiet"], check=True)

    bad = 0
    for kind, config in CONFIGS.items():
        model, optimizer = trained(config)
        here = work / kind
        here.mkdir(parents=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer}, here / "last.pt")
        run("convert", here / "last.pt", here / "native", "--to", 8, "--format", "native")
        run("convert", here / "native", here / "native3", "--from", 8, "--to", 3, "--stage", 3)
        model.save_pretrained(here / "theirs", max_shard_size=SHARD)
        run("convert", here / "theirs", here / "again", "--to", 5, "--format", "native")
        for source in ("native3", "again"):
            for cut in ([], ["--max-shard-size", SHARD]):
                folder = here / f"{source}-{'shards' if cut else 'one'}"
                drop = ["--drop", "*"] if source == "native3" else []  # the optimizer
                run("consolidate", here / source, folder, *drop, *cut)
                config.save_pretrained(folder)
                files = sum(1 for _ in folder.glob("*.safetensors"))
                wrong = differences(model, folder)
                bad += bool(wrong)
                print(f"{kind:8}{folder.name:16}{files} files: {'; '.join(wrong) or 'the same'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
