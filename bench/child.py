"""The process whose calls are timed: imports everything, then converts what it is told.

One request a line on stdin, one answer a line on stdout; see :class:`bench.measure.Child`.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any

import isal.isal_zlib  # noqa: F401 - what a first call would import

from reshard import Options, ReshardError, Wanted, api
from reshard.formats import formats


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Do one conversion and say how long it took."""
    wanted = Wanted(**request.get("wanted", {}))
    options = Options(**request.get("options", {}))
    begin, worked = time.perf_counter(), time.process_time()
    api.convert(request["source"], request["target"], wanted, options)
    found = {"seconds": time.perf_counter() - begin, "processor": time.process_time() - worked}
    gc.collect()
    return found


def main() -> None:
    """Answer until there are no more requests."""
    formats()
    sys.stdout.write(json.dumps({"ready": True}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        try:
            found = answer(json.loads(line))
        except ReshardError as error:
            found = {"error": str(error)}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


main()
