"""`python -m tests.drills`: inject every known fault into real jobs, and check that their final state is unchanged."""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.drills.core import DRILLS, Drill, DrillRow, NotHere, Perished, build_table
from tests.drills.floors import measure_floor, train
from tests.drills.scene import Scene, Session
from tests.support.object_store import PACKAGES, ObjectStore

MODULES = ("kills", "memory", "failures", "disks", "networks", "surroundings")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the drills and print the table. Return 0 if all jobs survived."""
    for module in MODULES:
        importlib.import_module(f"tests.drills.{module}")
    parser = argparse.ArgumentParser(prog="python -m tests.drills", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", choices=sorted(DRILLS), help="this drill only")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="how often each; default: 1")
    parser.add_argument("--fast", action="store_true", help="a few cheap ones, and short waits")
    parser.add_argument(
        "--store",
        action="store_true",
        help="keep checkpoints in moto's S3 (`make s3`), without what breaks a claim's files",
    )
    parser.add_argument("--no-floors", action="store_true", help="do not measure what starting again takes by hand")
    parser.add_argument("--keep", action="store_true", help="keep the folder of the runs")
    parser.add_argument("--list", action="store_true", help="say what there is")
    arguments = parser.parse_args(argv)
    chosen = [drill for drill in DRILLS.values() if _is_chosen(drill, arguments.only, arguments.fast)]
    if arguments.store:
        chosen = [drill for drill in chosen if drill.act.__module__ != "tests.drills.disks"]
    if arguments.list:
        width = max(map(len, DRILLS))
        print("\n".join(f"{drill.name:{width}}  {drill.about}" for drill in chosen))
        return 0
    if arguments.store and not PACKAGES.exists():
        parser.error("--store needs moto and s3fs: `make s3` installs them")
    folder = Path(tempfile.mkdtemp(prefix="ddp-drills-"))
    store = ObjectStore(folder) if arguments.store else None
    try:
        session = Session(folder, store=store)
        return run_all(chosen, session, runs=arguments.runs, fast=arguments.fast, floors=not arguments.no_floors)
    finally:
        if store is not None:
            store.stop()
        if arguments.keep:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def run_all(chosen: Sequence[Drill], session: Session, *, runs: int, fast: bool, floors: bool) -> int:
    """Run the drills in order. Return the exit code."""
    folder = session.folder
    if any(entry.trains for entry in chosen):
        session.reference = train(folder / "reference")
    rows = []
    for item in chosen:
        row = DrillRow(item)
        rows.append(row)
        for _ in range(runs):
            run_once(row, session, fast=fast)
            if floors and row.outcomes and row.outcomes[-1].floor and row.outcomes[-1].by_hand is None:
                assert session.reference is not None
                own = folder / f"floor-{item.name}-{len(row.outcomes)}"
                row.outcomes[-1].by_hand = measure_floor(row.outcomes[-1].floor, own, session.reference)
    print(f"\n{build_table(rows)}")
    failed = [(row.drill.name, problem) for row in rows for problem in row.problems]
    for name, problem in failed:
        print(f"\n{name}: {problem}", file=sys.stderr)
    return 1 if failed else 0


def run_once(row: DrillRow, session: Session, *, fast: bool) -> None:
    """Run one drill once and record the result."""
    scene = Scene(session, row.drill.name, fast=fast)
    since = time.monotonic()
    try:
        outcome = row.drill.act(scene)
        scene.check_nothing_left()
        row.outcomes.append(outcome)
        word = "survived"
    except NotHere as reason:
        row.not_here = str(reason)
        word = f"not run here: {reason}"
    except Exception as error:  # any error: the other drills and the table must not be lost
        trace = "" if isinstance(error, Perished) else f"\n{traceback.format_exc()}"
        row.problems.append(f"{type(error).__name__}: {error}{trace}")
        word = f"PERISHED: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    finally:
        scene.close()
    print(f"{row.drill.name}: {word} ({time.monotonic() - since:.0f} s)", flush=True)


def _is_chosen(drill: Drill, only: Sequence[str] | None, fast: bool) -> bool:
    return drill.name in only if only else drill.fast or not fast


if __name__ == "__main__":
    sys.exit(main())
