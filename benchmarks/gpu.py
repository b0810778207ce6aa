"""Runs the suite for GPUs on this machine and prints one table; see benchmarks/gpu.sh.

    python benchmarks/gpu.py [--data-dir DIR] [--quick] [--json FILE] [--kind KIND]

The first lines are the tests of tests/gpu, the others are measured here. `--kind vendor` and
`--kind cpu` run the whole of it without a GPU, on stand-ins: the table then says so, its figures
say nothing about a GPU, and their limits are not applied.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path


def main() -> int:
    """Run everything, print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", default="", help="the device kind (default: the first found)")
    parser.add_argument("--data-dir", default="", help="the folder of CIFAR-10's official files")
    parser.add_argument("--quick", action="store_true", help="few steps; checks that it all runs")
    parser.add_argument("--json", default="", help="write the rows to this file too")
    options = parser.parse_args()
    if options.kind:
        os.environ["KAITIAN_GPU_KIND"] = options.kind
    # Imported late: shared/stand_in.py reads the variable when it is imported.
    from on_gpu.suite import Suite, print_table

    with tempfile.TemporaryDirectory(prefix="kaitian-gpu-") as folder:
        suite = Suite(Path(folder), options.data_dir, quick=options.quick)
        if not suite.kind:
            parser.exit(2, "gpu.py: there is no accelerator; give --kind cpu or vendor\n")
        began = time.monotonic()
        rows = suite.run()
    print_table(suite, rows, time.monotonic() - began)
    if options.json:
        Path(options.json).write_text(json.dumps([vars(row) for row in rows], indent=2) + "\n")
    return int(any(row.verdict == "FAIL" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
