"""What zreshard does, in a minute: ``make demo``.

Takes a small checkpoint that DeepSpeed wrote, and goes from 8 ranks to 32 and to one file of whole
weights with the real command line; every command is printed before its output. The files stay in
``out/demo`` until the next run. Ends with an error if anything isn't as it should be. Needs no
torch.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
GOLDEN = REPO / "tests" / "golden" / "z2_p4_bf16"
MARK = ".made-by-the-demo"
CORRUPT = 4
"""The exit code for damaged checkpoints."""

SNIPPET = """\
import reshard

ckpt = reshard.open("ckpt-32")
weight = ckpt["blocks.0.fc1.weight"]
print(ckpt)
print(weight, "begins with", weight[0, :3])
"""

PROOF = """\
import reshard

model = reshard.open("model.safetensors")
truth = reshard.open("truth.safetensors")
names = [n.removeprefix("fp32.") for n in truth if n.startswith("fp32.")]
equal = [n for n in names if model[n].numpy().tobytes() == truth["fp32." + n].numpy().tobytes()]
print(f"{len(equal)} of {len(names)} weights have the bits that the live ranks held")
assert len(equal) == len(names) == 31
"""


class Demo:
    """Runs commands in one folder and says what it does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps = 0

    def step(self, title: str) -> None:
        self.steps += 1
        print(f"\n{self.steps}. {title}\n", flush=True)

    def zreshard(self, line: str, code: int = 0) -> str:
        """Run one command of zreshard, as its user types it."""
        return self._run(f"zreshard {line}", ["-m", "reshard.cli", *shlex.split(line)], code)

    def python(self, source: str) -> str:
        return self._run("python - <<'END'\n" + source + "END", ["-c", source], 0)

    def _run(self, shown: str, arguments: list[str], code: int) -> str:
        print(f"$ {shown}", flush=True)
        path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        print(textwrap.indent(done.stdout.rstrip(), "  "), flush=True)
        if done.returncode != code:
            raise SystemExit(f"\nthe demo failed: exit code {done.returncode} instead of {code}")
        return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=REPO / "out" / "demo", help="the folder")
    folder = prepare(parser.parse_args().out)
    demo = Demo(folder)

    demo.step("DeepSpeed wrote this on 4 ranks, at ZeRO stage 2. Make it one of 8 ranks, stage 3.")
    demo.zreshard("convert ckpt-4 ckpt-8 --from 4 --to 8 --stage 3")

    demo.step("What is in it? Only headers are read, and no code in them is run.")
    demo.zreshard("inspect ckpt-8")

    demo.step("The next job has 32 ranks. What would a conversion do?")
    demo.zreshard("plan ckpt-8 ckpt-32 --from 8 --to 32")

    demo.step("Convert it.")
    demo.zreshard("convert ckpt-8 ckpt-32 --from 8 --to 32")

    demo.step("Is the new one whole, and is it the same?")
    demo.zreshard("verify ckpt-32")
    demo.zreshard("diff ckpt-8 ckpt-32")

    demo.step("Whole weights in one file, proved against the first checkpoint.")
    demo.zreshard("consolidate ckpt-32 model.safetensors")
    demo.zreshard("verify model.safetensors --against ckpt-4 --weights")

    demo.step("One slice, from Python, out of 32 ranks' files.")
    demo.python(SNIPPET)

    demo.step("The weights, against what the ranks held in memory when DeepSpeed saved them.")
    demo.python(PROOF)

    demo.step("One bit flips on a disk. It is found.")
    flip(folder / "ckpt-32")
    demo.zreshard("verify ckpt-32", code=CORRUPT)
    flip(folder / "ckpt-32")

    shown = os.path.relpath(folder)
    print(
        f"\nAll {demo.steps} steps did what they should. The files are in {shown}:\n"
        "  ckpt-4             what DeepSpeed wrote: 4 ranks, ZeRO stage 2\n"
        "  ckpt-8, ckpt-32    DeepSpeed checkpoints of 8 and 32 ranks, ZeRO stage 3\n"
        "  model.safetensors  the whole fp32 weights\n"
        "  truth.safetensors  what the ranks held when the first checkpoint was saved"
    )


def prepare(folder: Path) -> Path:
    """An empty folder with the checkpoint that is begun with."""
    if folder.exists():
        if not (folder / MARK).is_file():
            raise SystemExit(f"{folder} exists and isn't the demo's: choose another folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARK).touch()
    shutil.copytree(GOLDEN / "ckpt", folder / "ckpt-4")
    shutil.copy(GOLDEN / "truth.safetensors", folder)
    return folder.resolve()


def flip(checkpoint: Path) -> None:
    """Flip a bit in the middle of rank 17's optimizer state."""
    (path,) = checkpoint.rglob("*_rank_17_*optim_states.pt")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)


if __name__ == "__main__":
    main()
