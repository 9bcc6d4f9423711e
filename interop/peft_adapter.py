"""Does PEFT load an adapter that zreshard resharded and wrote again?

A LoRA adapter of a small model is trained and saved with ``save_pretrained``, becomes a native
checkpoint of 4 ranks and an adapter's file again. PEFT must load it and give the same logits, bit
for bit. The same adapter with an empty tensor, as it is saved under ZeRO 3 without gathering, must
be refused.

    python interop/peft_adapter.py --zreshard "python -m reshard.cli" [--work DIR]

It runs where peft, transformers and torch are installed; see README.md.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers_load import arguments, logits

CONFIG = LlamaConfig(
    num_hidden_layers=2, hidden_size=48, intermediate_size=100, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=211,
)  # fmt: skip
NAME = "adapter_model.safetensors"


def base() -> PreTrainedModel:
    """The model below the adapter, the same each time."""
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(CONFIG)


def trained() -> PeftModel:
    """The model with an adapter after a few steps."""
    lora = LoraConfig(r=5, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(base(), lora)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        tokens = torch.randint(CONFIG.vocab_size, (2, 16))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return model.eval()


def main() -> int:
    """Run both cases; the exit code is 0 if they end as they must."""
    command, work = arguments(__doc__)

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        line = [*command, *map(str, words), "--quiet"]
        return subprocess.run(line, check=False, capture_output=True, text=True)

    model = trained()
    model.save_pretrained(work / "theirs")
    (work / "again").mkdir()
    shutil.copy(work / "theirs" / "adapter_config.json", work / "again")
    steps = (
        ("convert", work / "theirs", work / "native", "--to", 4, "--format", "native"),
        ("consolidate", work / "native", work / "again" / NAME),
    )
    for words in steps:
        done = run(*words)
        if done.returncode:
            print(done.stderr)
            return 1
    loaded = PeftModel.from_pretrained(base(), work / "again").eval()
    same = torch.equal(logits(model), logits(loaded))
    print(f"an adapter of {len(load_file(work / 'again' / NAME))} tensors:", end=" ")
    print("the same" if same else "the logits differ")

    shutil.copytree(work / "theirs", work / "empty")
    tensors = load_file(work / "empty" / NAME)
    tensors[next(iter(tensors))] = torch.empty(0)
    save_file(tensors, work / "empty" / NAME)
    refused = run("convert", work / "empty", work / "never", "--to", 4, "--format", "native")
    print(f"with an empty tensor: exit code {refused.returncode}: {refused.stderr.strip()}")
    return 0 if same and refused.returncode and not (work / "never").exists() else 1


if __name__ == "__main__":
    sys.exit(main())
