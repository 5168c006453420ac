"""How fast the trainer is on this machine's CPU: against the documents' loops, the bare step, and over a slow link.

Contenders take turns within one process a rank. Prints images a second and ratios; asserts nothing. The slow link is
one of 1 Gbit/s between two network namespaces that are made for it, which only root may.

On a machine that is busy with other things give ``--seconds 0 --rounds 40``, turns of a single step, and look at the
ratios of the fastest turns: those that nothing else came between.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ddp_trainer.benchmark import launch, synthetic
from ddp_trainer.benchmark.report import ratio
from ddp_trainer.benchmark.worker import Spec

# Title, preset, data set, changes. Wide networks are as narrow as one core takes; that goes for all contenders.
FAMILIES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("ResNet-18, CIFAR-10", "cifar10-resnet18", "cifar10", {}),
    ("WideResNet k = 2, full augmentation", "cifar10-wideresnet", "cifar10",
     {"model": {"widen": 2}, "data": {"batch_size": 64}}),
    ("WideResNet k = 2, Fashion-MNIST", "fashion-mnist-wideresnet", "fashion-mnist", {"model": {"widen": 2}}),
)  # fmt: skip
CONTENDERS = ["documents", "ours:preset", "bare:preset", "ours:nchw", "bare:nchw"]
LINK = ["documents", "ours:plain-ddp", "ours:bf16-hook", "ours:bf16-all"]
# Two namespaces and the cable between them; the names are unlikely to be anybody else's.
SPACES = ("ddpbench0", "ddpbench1")
ADDRESSES = ("10.213.77.1", "10.213.77.2")


def measure(title: str, spec: Spec, ranks: int, folder: Path, pairs: Sequence[tuple[str, str]], **options: Any) -> None:
    """Run one case and print its lines; a case that fails says so and the others go on."""
    print(
        f"{title}, {ranks} rank(s), batch {spec.changes.get('data', {}).get('batch_size', 'of the preset')}", flush=True
    )
    try:
        results = launch.run(spec, ranks, folder, 1200, **options)["results"]
    except launch.Failed as error:
        print(f"  failed: {error}", flush=True)
        return
    for name, result in results.items():
        if "failed" in result:
            print(f"  {name:16} failed: {result['failed']}")
            continue
        rate, low, high = (result[key] for key in ("images_per_second", "lowest", "highest"))
        data, step = result["data_seconds"] * 1e3, result["step_seconds"] * 1e3
        print(f"  {name:16} {rate:8.1f} images/s   {low:.1f} … {high:.1f}   data {data:.1f} of {step:.1f} ms a step")
        if "report_seconds" in result:
            report, held = result["report_seconds"] * 1e6, result["save_held_seconds"] * 1e3
            print(f"  {'':16} exporter and log {report:.1f} us a step; a checkpoint holds the loop up {held:.1f} ms "
                  f"and is on the disk after {result['save_seconds'] * 1e3:.0f}")  # fmt: skip
    for ours, theirs in pairs:
        if all("images_per_second" in results.get(name, {}) for name in (ours, theirs)):
            fastest = fast(results[ours]["rates"]) / fast(results[theirs]["rates"])
            print(f"  {ours} / {theirs}: {ratio(results[ours], results[theirs]):.3f}, fastest turns {fastest:.3f}")
    print(flush=True)


def fast(rates: Sequence[float]) -> float:
    """The mean rate of the fastest tenth of the turns, at least of one."""
    return statistics.mean(sorted(rates)[-max(1, len(rates) // 10) :])


def measure_memory(title: str, spec: Spec, folder: Path) -> None:
    """Print the peak memory of ours over the bare step's, each measured alone in a process."""
    peaks = {}
    for name in ("ours:preset", "bare:preset"):
        alone = {**vars(spec), "contenders": [name], "rounds": 1, "seconds": 0.0}
        try:
            peaks[name] = launch.run(Spec(**alone), 1, folder, 600)["results"][name]
        except launch.Failed as error:
            print(f"  {title}: memory: {error}")
            return
    ours, bare = peaks.values()
    own, cache, least = ours["peak_bytes"] - ours["cache_bytes"], ours["cache_bytes"], bare["peak_bytes"]
    print(f"  {title}: peak memory {own / 2**20:.0f} MiB besides {cache / 2**20:.0f} MiB of cached images, "
          f"bare step {least / 2**20:.0f} MiB: {own / least:.2f}\n", flush=True)  # fmt: skip


@contextlib.contextmanager
def slow_link(rate: str) -> Iterator[None]:
    """Two network namespaces whose only connection lets ``rate`` through, each way."""

    def do(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True)

    try:
        for space in SPACES:
            do("ip", "netns", "add", space)
        do("ip", "link", "add", "ddpbench-a", "netns", SPACES[0], "type", "veth",
           "peer", "name", "ddpbench-b", "netns", SPACES[1])  # fmt: skip
        for space, device, address in zip(SPACES, ("ddpbench-a", "ddpbench-b"), ADDRESSES, strict=True):
            inside = ("ip", "netns", "exec", space)
            do(*inside, "ip", "address", "add", f"{address}/24", "dev", device)
            do(*inside, "ip", "link", "set", device, "up")
            do(*inside, "ip", "link", "set", "lo", "up")
            # A packet of a veth may be 64 KiB large: the bucket must hold some of them.
            do(
                *inside,
                "tc",
                "qdisc",
                "add",
                "dev",
                device,
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                "256kb",
                "latency",
                "50ms",
            )
        yield
    finally:
        for space in SPACES:
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)


def over_slow_link(spec: Spec, folder: Path, rate: str) -> None:
    """Measure two ranks in two namespaces, or say why not."""
    lacking = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if os.geteuid() != 0 or lacking:
        print(f"no slow link: {f'{lacking} not found' if lacking else 'only root may make network namespaces'}")
        return
    try:
        with slow_link(rate):
            prefixes = [("ip", "netns", "exec", space, "env", f"GLOO_SOCKET_IFNAME={device}")
                        for space, device in zip(SPACES, ("ddpbench-a", "ddpbench-b"), strict=True)]  # fmt: skip
            pairs = [("ours:bf16-hook", "ours:plain-ddp"), ("ours:bf16-all", "ours:plain-ddp"),
                     ("ours:bf16-all", "documents")]  # fmt: skip
            measure(f"ResNet-18 over {rate}", spec, 2, folder, pairs, prefixes=prefixes,
                    environ={"MASTER_ADDR": ADDRESSES[0]})  # fmt: skip
    except subprocess.CalledProcessError as error:
        print(f"no slow link: {' '.join(error.cmd)}: {error.stderr.decode().strip()}")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure everything that can be measured here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contender")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a turn")
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks")
    parser.add_argument("--only", default="", help="part of a title: only these families; 'link': only the slow link")
    parser.add_argument("--rate", default="1gbit", help="of the slow link, as tc writes it")
    arguments = parser.parse_args(argv)
    pace = {"rounds": arguments.rounds, "seconds": arguments.seconds, "device": "cpu", "warm_up": 1}
    with tempfile.TemporaryDirectory(prefix="ddp-bench-") as name:
        folder = Path(name)
        for dataset in ("cifar10", "fashion-mnist"):
            synthetic.write(dataset, folder / dataset, 10_000)
        result = str(folder / "result.json")
        pairs = [("ours:preset", "documents"), ("ours:nchw", "documents"), ("ours:preset", "bare:preset"),
                 ("ours:nchw", "bare:nchw")]  # fmt: skip
        for title, preset, dataset, changes in FAMILIES:
            if arguments.only and arguments.only not in title:
                continue
            changes = {**changes, "data": {**changes.get("data", {}), "dir": str(folder / dataset)}}
            spec = Spec(preset=preset, changes=changes, contenders=CONTENDERS, result=result, **pace)
            for ranks in map(int, arguments.ranks.split(",")):
                measure(title, spec, ranks, folder, pairs)
            if "1" in arguments.ranks.split(","):
                measure_memory(title, spec, folder)
        if arguments.only in ("", "link"):
            changes = {"data": {"batch_size": 32, "dir": str(folder / "cifar10")}}
            spec = Spec(preset="cifar10-resnet18", changes=changes, contenders=LINK, result=result, **pace)
            over_slow_link(spec, folder, arguments.rate)


if __name__ == "__main__":
    main()
