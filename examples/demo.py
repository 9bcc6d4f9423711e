"""What zreshard does, in a minute: ``make demo``.

Trains a small transformer on 8 ranks (``train.py``, which lies beside this file), makes its
checkpoint one of 32 ranks, goes on from that on 2 ranks at another ZeRO stage, and writes the whole
weights in one file. Then the same with a checkpoint that DeepSpeed wrote. Every command is printed
before its output. The files stay in ``out/demo`` until the next run. Ends with an error if anything
isn't as it should be.
"""

from __future__ import annotations

import argparse
import os
import re
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
weight = ckpt["blocks.0.up.weight"]
print(ckpt)
print(weight, "begins with", weight[0, :3])
"""

PROOF = """\
import reshard

weights = reshard.open("deepspeed.safetensors")
truth = reshard.open("truth.safetensors")
names = [n.removeprefix("fp32.") for n in truth if n.startswith("fp32.")]
equal = [n for n in names if weights[n].numpy().tobytes() == truth["fp32." + n].numpy().tobytes()]
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

    def torchrun(self, line: str) -> str:
        """Run a script on several ranks, one thread each."""
        return self._run(f"torchrun {line}", ["-m", "torch.distributed.run", *shlex.split(line)], 0)

    def python(self, source: str) -> str:
        return self._run("python - <<'END'\n" + source + "END", ["-c", source], 0)

    def _run(self, shown: str, arguments: list[str], code: int) -> str:
        print(f"$ {shown}", flush=True)
        path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
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

    demo.step(
        "A small transformer trains on 8 ranks, ZeRO stage 3: each holds an eighth of it all."
    )
    whole = demo.torchrun(
        "--nproc-per-node 8 train.py --stage 3 --steps 6 --save-every 3 --folder run"
    )

    demo.step("It saved twice, and trained on meanwhile. What is in the first checkpoint?")
    demo.zreshard("inspect run/step-3")

    demo.step("The next job has 32 ranks. What would a conversion do?")
    demo.zreshard("plan run/step-3 ckpt-32 --from 8 --to 32")

    demo.step("Convert it. Is the new one whole, and is it the same?")
    demo.zreshard("convert run/step-3 ckpt-32 --from 8 --to 32")
    demo.zreshard("verify ckpt-32")
    demo.zreshard("diff run/step-3 ckpt-32")

    demo.step("One slice, from Python, out of 32 ranks' files.")
    demo.python(SNIPPET)

    demo.step("Train on from it: any number of ranks can, at any stage. Here it is 2, at stage 2.")
    rest = demo.torchrun(
        "--nproc-per-node 2 train.py --stage 2 --steps 6 --resume ckpt-32 --folder again"
    )

    demo.step("Are its losses those of the run that went on without a break?")
    compare(losses(whole), losses(rest))

    demo.step("Whole weights in one file, proved against those of the run without a break.")
    demo.zreshard("consolidate again/step-6 model.safetensors")
    demo.zreshard("verify model.safetensors --against run/step-6 --weights")

    demo.step("DeepSpeed wrote ckpt-4 on 4 ranks, at stage 2. Make it one of 8 ranks, stage 3.")
    demo.zreshard("convert ckpt-4 ckpt-8 --from 4 --to 8 --stage 3")

    demo.step("Its weights in one file, against what DeepSpeed held in memory when it saved.")
    demo.zreshard("consolidate ckpt-8 deepspeed.safetensors")
    demo.python(PROOF)

    demo.step("One bit flips on a disk. It is found.")
    flip(folder / "ckpt-8")
    demo.zreshard("verify ckpt-8", code=CORRUPT)
    flip(folder / "ckpt-8")

    shown = os.path.relpath(folder)
    print(
        f"\nAll {demo.steps} steps did what they should. The files are in {shown}:\n"
        "  run, again             what the two runs saved\n"
        "  ckpt-32                the checkpoint between them, of 32 ranks\n"
        "  model.safetensors      the trained weights\n"
        "  ckpt-4, ckpt-8         DeepSpeed checkpoints of 4 ranks (its own) and 8 (converted)\n"
        "  deepspeed.safetensors  the weights in them\n"
        "  truth.safetensors      what DeepSpeed held in memory when it saved ckpt-4"
    )


def losses(printed: str) -> dict[int, str]:
    """The losses that a run printed, by step."""
    return {int(n): loss for n, loss in re.findall(r"step +(\d+)  loss ([\d.]+)", printed)}


def compare(whole: dict[int, str], rest: dict[int, str]) -> None:
    """Show the losses of both runs side by side, all their digits."""
    print("  step   8 ranks, stage 3   2 ranks, stage 2")
    for step, loss in whole.items():
        print(f"  {step:>4}   {loss:>16}   {rest.get(step, ''):>16}")
    if not rest or any(whole.get(step) != loss for step, loss in rest.items()):
        raise SystemExit("\nthe demo failed: the losses differ")
    print(f"  All {len(rest)} losses are equal to the last bit.", flush=True)


def prepare(folder: Path) -> Path:
    """A folder with the training script and DeepSpeed's checkpoint."""
    if folder.exists():
        if not (folder / MARK).is_file():
            raise SystemExit(f"{folder} exists and isn't the demo's: choose another folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARK).touch()
    shutil.copy(REPO / "examples" / "train.py", folder)
    shutil.copytree(GOLDEN / "ckpt", folder / "ckpt-4")
    shutil.copy(GOLDEN / "truth.safetensors", folder)
    return folder.resolve()


def flip(checkpoint: Path) -> None:
    """Flip a bit in the middle of rank 5's optimizer state."""
    (path,) = checkpoint.rglob("*_rank_5_*optim_states.pt")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)


if __name__ == "__main__":
    main()
