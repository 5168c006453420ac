"""One measurement of ``tests/gpu/run``: ``python -m tests.gpu.measure NAME … --result FILE``."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ddp_pod.rank.counters import CounterMemory
from ddp_sdk.rank_env import RankEnv
from ddp_trainer.config.presets import PRESETS
from ddp_trainer.distributed import DistributedConfig
from ddp_trainer.distributed.world import World
from ddp_trainer.options import merge
from tests.bench import memory_copies, step_hook
from tests.bench.trainer import synthetic, worker
from tests.bench.trainer.contenders import Bare, build_config
from tests.bench.trainer.systems import BY_NAME, QUICK
from tests.gpu.plan import PRECISIONS, choose_loops

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}
# With --quick steps are still smaller than those of the benchmark, which measures fewer systems.
_QUICK_DATA = {"cifar10-resnet50": {"batch_size": 4}, "voc2012-deeplabv3-resnet101": {"image_size": 48}}


class Measurement:
    """The settings of a measurement, and the file of its result so far."""

    def __init__(self, device: str, quick: bool, data: Path, result: Path) -> None:
        self.device = device
        self.quick = quick
        self.data = data
        self._result = result
        self._problems: list[str] = []

    def write(self, **content: object) -> None:
        """Replace the result. It is whole when the process is killed."""
        new = self._result.with_suffix(".new")
        new.write_text(json.dumps(content))
        new.replace(self._result)

    def start_world(self) -> World:
        """Return the world of this single rank."""
        return World.start(DistributedConfig(device=self.device), RankEnv())

    def measure(self, world: World, preset: str, contenders: list[str], **settings: Any) -> dict[str, Any]:
        """Measure loops of a preset in turns, and note those that fail."""
        pace = {"rounds": 2, "seconds": 0.0, "warm_up": 1} if self.quick else {"rounds": 3, "seconds": 0.5}
        values = {"costs": False, **pace, **settings}
        spec = worker.MeasurementSpec(preset, self.change(preset), contenders, self.device, result="", **values)
        about = worker.measure(spec, world)
        results = about["results"].items()
        self._problems += [f"{preset} {name}: {result['failed']}" for name, result in results if "failed" in result]
        return about

    def change(self, preset: str) -> dict[str, Any]:
        """Return the changes of a preset: the folder of its data, and with --quick small steps."""
        folder = str(self.data / PRESETS[preset].values["data"]["name"])
        small = merge(QUICK[preset], {"data": _QUICK_DATA.get(preset, {})}) if self.quick else {}
        return merge(small, {"data": {"dir": folder}})

    def finish(self) -> None:
        """Exit with the problems, if a loop failed."""
        if self._problems:
            sys.exit("; ".join(self._problems))


def measure_rates(device: str, quick: bool) -> dict[str, Any]:
    """Return the bandwidth of a copy, bytes read and written, and the operations of matrix products, per second."""
    source = torch.zeros((16 if quick else 2048) << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / _time_call(lambda: target.copy_(source), device)
    size = 256 if quick else 8192
    rates = {}
    for name, dtype in DTYPES.items():
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        factor = torch.randn(size, size, device=device).to(dtype)
        rates[name] = 2 * size**3 / _time_call(factor.matmul, device, factor)
    torch.backends.cuda.matmul.allow_tf32 = False
    return {"bytesPerSecond": bandwidth, "operationsPerSecond": rates}


def _time_call(call: Callable[..., object], device: str, *arguments: object) -> float:
    """Return the seconds of a call, the least of three means, after a first call."""
    call(*arguments)
    means = []
    for _ in range(3):
        _synchronize(device)
        started = time.perf_counter()
        for _ in range(10):
            call(*arguments)
        _synchronize(device)
        means.append((time.perf_counter() - started) / 10)
    return min(means)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure_card(measurement: Measurement) -> None:
    """Measure the device's rates, and name device and versions."""
    about: dict[str, Any] = {"device": platform.machine(), "python": platform.python_version()}
    if measurement.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        about |= {"device": properties.name, "memoryBytes": properties.total_memory, "cuda": torch.version.cuda}
        about |= {"cudnn": torch.backends.cudnn.version()}
    rates = measure_rates(measurement.device, measurement.quick)
    measurement.write(torch=torch.__version__, **about, **rates)


def write_data(measurement: Measurement) -> None:
    """Write noise in the form of each data set."""
    limits = {**synthetic.EPOCH, "voc2012": 200}
    samples = {
        name: synthetic.write(name, measurement.data / name, min(number, 600 if measurement.quick else number))
        for name, number in limits.items()
    }
    measurement.write(samples=samples)


def compile_step(measurement: Measurement, name: str, precision: str) -> None:
    """Compile the bare step of a system; torch.compile finds it in its cache when the system is measured."""
    system = BY_NAME[name]
    loops = choose_loops(system, precision, measurement.device)
    assert loops is not None
    world = measurement.start_world()
    about = measurement.measure(world, system.preset, [loops.bare], rounds=1, seconds=0.0)
    measurement.write(results=about["results"])


def measure_system(measurement: Measurement, name: str) -> None:
    """Measure the loops of a system, one number format after the other."""
    system = BY_NAME[name]
    world = measurement.start_world()
    results: dict[str, Any] = {}
    for precision in PRECISIONS:
        loops = choose_loops(system, precision, measurement.device)
        if loops is None:
            continue
        results[precision] = measurement.measure(world, system.preset, loops.names) | {"loops": loops._asdict()}
        measurement.write(preset=system.preset, quick=measurement.quick, precisions=results)
        torch.compiler.reset()
        gc.collect()
        if measurement.device == "cuda":
            torch.cuda.empty_cache()


class TrafficMode(TorchDispatchMode):
    """Counts the bytes of the inputs and outputs of convolutions and matrix products, in ``bytes``."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function._overloadpacket in flop_registry:
            leaves = tree_leaves((args, kwargs, result))
            self.bytes += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        return result


def measure_floor(measurement: Measurement) -> None:
    """Compare ResNet-18 with the least time that its bytes and operations take at the measured rates.

    The bytes are those of convolutions, matrix products and the update (weights and momentum read and written,
    gradients read): all else can be fused into these.
    """
    preset = BY_NAME["cifar10-resnet18"].preset
    world = measurement.start_world()
    rates = measure_rates(measurement.device, measurement.quick)
    names = ["ours:preset", *(["ours:compile", "bare:compile"] if measurement.device == "cuda" else [])]
    results = measurement.measure(world, preset, names)["results"]
    device = {"distributed": {"device": measurement.device}}
    bare = Bare(build_config(preset, device, measurement.change(preset)), world)
    steps = bare.steps()
    next(steps)
    with FlopCounterMode(display=False) as counter, TrafficMode() as traffic:
        next(steps)
    operations = counter.get_total_flops()
    engine = bare.parts.engine
    state = 5 * sum(parameter.nbytes for parameter in engine.model.parameters())
    seconds = max(
        operations / rates["operationsPerSecond"][engine.precision.name],
        (traffic.bytes + state) / rates["bytesPerSecond"],
    )
    measurement.write(
        **rates,
        results=results,
        precision=engine.precision.name,
        operations=operations,
        trafficBytes=traffic.bytes,
        stateBytes=state,
        floorSeconds=seconds,
        floorImagesPerSecond=bare.batch_size / seconds,
        shares={name: seconds / end["step_seconds"] for name, end in results.items() if "step_seconds" in end},
    )


def measure_costs(measurement: Measurement) -> None:
    """Measure what the step hook, copies in memory, and the exporter with the log cost a step."""
    device = measurement.device
    with tempfile.TemporaryDirectory() as folder:
        memory = CounterMemory(folder, 1)
        step = step_hook.build_step(torch.nn.Linear(16, 4), device)
        without, with_hook = step_hook.measure(step, folder, 0, rounds=3 if measurement.quick else 20)
        del memory
    hook = {"withoutSeconds": without, "withSeconds": with_hook}
    measurement.write(hook=hook)
    # A block has several copies with the automatic interval: the share of a shorter one is that of a single copy.
    batch, rounds, steps = (8, 2, 16) if measurement.quick else (64, 5, 40)
    resnet = memory_copies.build_resnet(batch, device)
    copies = [cost._asdict() for cost in memory_copies.measure("ResNet-18", resnet, rounds, steps)]
    measurement.write(hook=hook, copies=copies)
    world = measurement.start_world()
    loop = measurement.measure(world, "cifar10-resnet18", ["ours:preset", "bare:preset"], costs=True)["results"]
    measurement.write(hook=hook, copies=copies, loop=loop)


COMMANDS: dict[str, Callable[..., None]] = {
    "card": measure_card,
    "data": write_data,
    "compile": compile_step,
    "system": measure_system,
    "floor": measure_floor,
    "costs": measure_costs,
}


def main() -> None:
    """Run one measurement."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--device", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    flags = parser.parse_args()
    if flags.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no GPU")
    measurement = Measurement(flags.device, flags.quick, flags.data, flags.result)
    COMMANDS[flags.command](measurement, *flags.arguments)
    measurement.finish()


if __name__ == "__main__":
    main()
