"""Plans against what they must be: optimal, kept in a rehearsal, and quick. `python -m tests.benchmarks.plans [A|B|C]`.

A: devmap beside transformers' own planner on models of the corpus with random budgets, and beside the optimum.
B: random plans for random workloads, each rehearsed with its budgets as the devices' memory.
C: seconds of planning alone.

The exit code is 1 where anything is broken that must hold. What is broken is printed with its case, and
`--only MODEL --case N` with the same seed runs that one again.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

from rich.console import Console

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> int:
    """Run the parts asked for."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["DEVMAP_CACHE"] = cache  # nothing kept from before a change
        return 0 if _run(_options(), Console(width=160)) else 1


def _run(options: argparse.Namespace, console: Console) -> bool:
    holds = True
    if options.part in (None, "A"):
        from tests.benchmarks.plans import beside

        case = options.case if options.part else None
        holds &= beside.run(console, options.seed, options.models, options.cases or 6, options.only, case)
    if options.part in (None, "B"):
        from tests.benchmarks.plans import rehearsed

        case = options.case if options.part else None
        holds &= rehearsed.run(console, options.seed, options.cases or 500, case)
    if options.part in (None, "C"):
        from tests.benchmarks.plans import seconds

        seconds.run(console, options.seed)
    return holds


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.plans")
    parser.add_argument("part", nargs="?", choices=["A", "B", "C"], help="all where none is named")
    parser.add_argument("--models", type=int, metavar="N", help="A: so many models of the corpus [all]")
    parser.add_argument("--cases", type=int, metavar="N", help="A: budgets per model [6]; B: plans [500]")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--only", default="", metavar="TEXT", help="A: models with TEXT in their name")
    parser.add_argument("--case", type=int, metavar="N", help="with a part: one case alone")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
