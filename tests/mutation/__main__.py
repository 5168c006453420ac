"""Mutate the modules of the table, and print how many of the mutations their tests have detected.

    python -m tests.mutation [--sample 200] [--seed 0] [--only decide/decide] [--jobs 2]

Exits with 1 if fewer than nine of ten are detected, or a test fails without any mutation. Each mutation runs in a
separate process; the checkout is never written.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import random
import signal
import sys
from itertools import groupby

from tests.support import ROOT

from .mutations import mutations
from .nearest import find_modules, find_tests
from .running import Try, run_mutations

ENOUGH = 0.9
FOREIGN = (
    "xdist", "pytest_asyncio", "pytest_timeout", "hypothesis", "msgspec", "yaml", "kopf", "aiohttp", "psutil",
    "prometheus_client", "numpy", "torch", "kubernetes_validate", "jsonschema", "cel_expr_python",
)  # fmt: skip
"""Imported once: only foreign modules, none of which may start a thread."""


def find_tries(only: str) -> list[Try]:
    """Return every mutation of the modules whose path contains this text."""
    return [
        Try(module, number, mutation.statement)
        for module in find_modules()
        if only in module
        for number, mutation in enumerate(mutations(ast.parse((ROOT / module).read_text(encoding="utf-8"))))
    ]


def main() -> int:
    """Run the requested mutations, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, help="how many mutations to try, drawn from all (default: all)")
    parser.add_argument("--seed", default="0", help="another one draws others")
    parser.add_argument("--only", default="", help="modules whose path has this in it")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="try only these tests of theirs (files or folders)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at the same time")
    options = parser.parse_args()
    tries = find_tries(options.only)
    if options.sample is not None and options.sample < len(tries):
        tries = sorted(random.Random(options.seed).sample(tries, options.sample), key=tries.index)
    os.environ |= {"HYPOTHESIS_EXAMPLES": "10", "OMP_NUM_THREADS": "1", "COVERAGE_CORE": "ctrace"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for name in FOREIGN:
        importlib.import_module(name)
    killed = 0
    failed = []
    for package, some in groupby(tries, lambda item: item.module.split("/")[0]):
        tests, noticed = run_mutations(list(some), options.tests or find_tests(package), options.jobs)
        failed += tests.failed
        for module, group in groupby(sorted(noticed, key=tries.index), lambda entry: entry.module):
            tried = list(group)
            count = sum(noticed[element] for element in tried)
            killed += count
            print(f"{count:>4}/{len(tried):<4} {module}", flush=True)
    for test in failed:
        print(f"fails without any mutation: {test}")
    print(f"killed {killed} of {len(tries)} (seed {options.seed})")
    return 1 if failed or killed < ENOUGH * len(tries) else 0


if __name__ == "__main__":
    sys.exit(main())
