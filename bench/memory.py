"""How much memory does a conversion of any checkpoint take?

Run it with ``python bench/memory.py PATH ...``. Each is converted to the native format for 4 ranks,
in a process of its own that has everything imported; printed is what grows over that. Files are
written next to the checkpoint and removed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.measure import grown


def main() -> None:
    """The command line."""
    for name in sys.argv[1:]:
        source = Path(name)
        target = source.with_name(f"{source.name}-converted")
        peak, seconds = grown(source, target, {"format": "native", "world": 4})
        anon, mapped = peak.growth("RssAnon") / 1e6, peak.growth("RssFile") / 1e6
        print(f"{name}: anonymous +{anon:.1f} MB, mapped +{mapped:.1f} MB, {seconds:.2f} s")


if __name__ == "__main__":
    main()
