"""Scripts with one fault each, of the kinds that people write, and what `ddp check` must report.

A fault is a few changed lines of a script without faults, or a script of its own. `# fault` marks the line to report.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

SCRIPTS: Final = Path(__file__).with_name("scripts")
MARK: Final = "# fault"
HELPER: Final = "common.py"

GROUP: Final = "one group"
GRADIENTS: Final = "gradients are shared"
DATA: Final = "different data"
ORDER: Final = "another order each epoch"
STEPS: Final = "equal numbers of steps"
CHANGE: Final = "weights change"
PARAMETERS: Final = "same parameters"
VALIDATION: Final = "separate validation data"
SAVED: Final = "saved weights"
WRITER: Final = "one writer"
WEIGHTS: Final = "same initial weights"
FINITE: Final = "finite"
RESUME: Final = "resumes exactly"
STOP: Final = "stops in time"
RANDOM: Final = "own random numbers"

FAILED: Final = "failed"
WARNING: Final = "warning"


class Fault(NamedTuple):
    """A fault of a script, and what `ddp check` must report.

    ``check``: the one that must have the state ``state``; ``edits``: texts to replace, each with the new one;
    ``words``, ``never``: patterns that its reason or remedy must have, and must not have; ``pods``: of a run;
    ``also``: checks that the same fault may break too, at some steps of interruption; ``helper``: text in the line of
    common.py that is to be reported.
    """

    check: str
    script: str
    edits: tuple[tuple[str, str], ...] = ()
    words: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    state: str = FAILED
    pods: int = 1
    also: tuple[str, ...] = ()
    helper: str = ""

    def write(self) -> str:
        """Return the text of the faulty script."""
        text = (SCRIPTS / self.script).read_text()
        for old, new in self.edits:
            assert text.count(old) == 1, f"{self.script} has {text.count(old)} times {old!r}"
            text = text.replace(old, new)
        return text

    def is_reported_at(self, place: str) -> bool:
        """Return whether a reported line is a marked one, or next to it: a statement may have several."""
        file, _, number = place.rpartition(":")
        if self.helper:
            lines = (SCRIPTS / HELPER).read_text().splitlines()
            return file == HELPER and self.helper in lines[int(number) - 1]
        return file == self.script and any(abs(int(number) - line) <= 1 for line in self.find_lines())

    def find_lines(self) -> list[int]:
        """Return the numbers of the marked lines: of each it is right to be reported."""
        numbers = [number for number, line in enumerate(self.write().splitlines(), 1) if MARK in line]
        assert numbers, f"{self.script}: mark a line with {MARK}"
        return numbers


_INIT: Final = 'dist.init_process_group("gloo")\n'
_SAMPLER: Final = "sampler = DistributedSampler(data, drop_last=True)\n"
_LOADER: Final = "loader = DataLoader(data, batch_size=32, sampler=sampler, generator=torch.Generator())\n"
_SET_EPOCH: Final = "    sampler.set_epoch(epoch)\n"
_LOOP: Final = "    for batch, (images, labels) in enumerate(loader):\n"
_FORWARD: Final = "        loss = cross_entropy(model(images), labels)\n"
_AVERAGE: Final = "        for parameter in model.parameters():\n            dist.all_reduce"
_WRAP: Final = "model = DistributedDataParallel(network)\n"
_FIRST_STATE: Final = '        state = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}\n'
_STATE: Final = (
    "        state.update(scheduler=scheduler.state_dict(), random=random_states, epoch=epoch, batch=batch + 1)\n"
)
_SAVE: Final = '        torch.save(state, PATH + ".new")\n'
_REPLACE: Final = '        os.replace(PATH + ".new", PATH)\n'
_MARKED_SAVE: Final = (_SAVE, f'        torch.save(state, PATH + ".new")  {MARK}\n')
_SIGNAL: Final = "signal.signal(signal.SIGTERM, lambda *_: stop.fill_(1))\n"


_LEAVE_LOOP: Final = (
    "            dist.destroy_process_group()\n            sys.exit(143)\n",
    "            break\n    if stop:\n        break\n",
)
_NORMALIZER: Final = """
class Normalizer:
    def __init__(self):
        self.mean = 1.0

    def update(self, value):
        self.mean += 0.1 * (value - self.mean)
        return self.mean


normalizer = Normalizer()
"""
_RESULT: Final = '    torch.save(network.state_dict(), "trained.pt")'


_OWN_SAMPLER: Final = """
class OwnSampler(torch.utils.data.Sampler):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter(order[rank::world_size])

    def __len__(self):
        return len(data) // world_size


sampler = OwnSampler()
"""
_NESTED: Final = """
if "NESTED" not in os.environ:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    sys.exit(subprocess.run(command, env={**os.environ, "NESTED": "1"}, check=False).returncode)
"""


def mark(line: str) -> str:
    """Return a line that is to be reported, with its end."""
    return f"{line.rstrip()}  {MARK}\n"


FAULTS: Final = MappingProxyType(
    {
        "no group": Fault(
            GROUP,
            "mlp.py",
            (
                (_INIT, ""),
                ("rank = dist.get_rank()", 'rank = int(os.environ["RANK"])'),
                ("world_size = dist.get_world_size()", 'world_size = int(os.environ["WORLD_SIZE"])'),
                (_SAMPLER, _SAMPLER.replace("data,", "data, num_replicas=world_size, rank=rank,")),
                (_WRAP, "model = network\n"),
                ("    dist.all_gather_object(random_states, torch.get_rng_state())\n", ""),
                ("random=random_states,", "random=[torch.get_rng_state()] * world_size,"),
                ("        optimizer.step()\n", mark("        optimizer.step()")),
                ("        dist.all_reduce(stop)\n", ""),
                ("            dist.destroy_process_group()\n", ""),
                ('"trained.pt")\ndist.destroy_process_group()\n', '"trained.pt")\n'),
            ),
        ),
        "group of one": Fault(
            GROUP,
            "mlp.py",
            ((_INIT, mark('dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())')),),
        ),
        "nested launcher": Fault(
            GROUP,
            "mlp.py",
            (
                ("import signal\n", "import signal\nimport subprocess\n"),
                (_INIT, _NESTED + mark(_INIT)),
            ),
        ),
        "spawned ranks": Fault(GROUP, "spawned.py"),
        "not wrapped": Fault(GRADIENTS, "mlp.py", ((_WRAP, mark("model = network")),)),
        "part of the gradients": Fault(
            GRADIENTS,
            "manual.py",
            (
                ("nn.Linear(32, 10))\n", mark("nn.Linear(32, 10))")),
                (_AVERAGE, _AVERAGE.replace("model.parameters()", "model[2].parameters()")),
            ),
        ),
        "layer that is never called": Fault(
            GRADIENTS,
            "mlp.py",
            (
                (
                    _WRAP,
                    f"network[3].head = nn.Linear(32, 2)  {MARK}\n"
                    "model = DistributedDataParallel(network, find_unused_parameters=True)\n",
                ),
            ),
        ),
        "layer replaced after wrapping": Fault(
            GRADIENTS,
            "mlp.py",
            (
                (
                    _WRAP,
                    "model = DistributedDataParallel(network, find_unused_parameters=True)\n"
                    f"network[3] = nn.Linear(32, 10)  {MARK}\n",
                ),
            ),
        ),
        "no sampler": Fault(
            DATA,
            "mlp.py",
            (
                (_LOADER, mark(_LOADER.replace("sampler=sampler,", "shuffle=True, drop_last=True,"))),
                (_SET_EPOCH, "    loader.generator.manual_seed(epoch)\n"),
            ),
        ),
        "sampler with rank 0": Fault(
            DATA, "mlp.py", ((_SAMPLER, mark(_SAMPLER.replace("data,", "data, num_replicas=world_size, rank=0,"))),)
        ),
        "sampler with the local rank": Fault(
            DATA,
            "mlp.py",
            (
                (
                    _SAMPLER,
                    mark(
                        'sampler = DistributedSampler(data, world_size, int(os.environ["LOCAL_RANK"]), drop_last=True)'
                    ),
                ),
            ),
        ),
        "sampler for one replica": Fault(
            DATA, "mlp.py", ((_SAMPLER, mark(_SAMPLER.replace("data,", "data, num_replicas=1, rank=0,"))),)
        ),
        "same first batch": Fault(
            DATA,
            "mlp.py",
            ((_FORWARD, f"        if batch == 0:\n            images, labels = data[:32]  {MARK}\n" + _FORWARD),),
        ),
        "no set_epoch": Fault(ORDER, "mlp.py", ((_SET_EPOCH, ""), (_LOOP, mark(_LOOP)))),
        "set_epoch with a constant": Fault(ORDER, "mlp.py", ((_SET_EPOCH, mark("    sampler.set_epoch(0)")),)),
        "nothing is learned": Fault(
            CHANGE,
            "mlp.py",
            (
                (_FORWARD, "        loss = 0 * cross_entropy(model(images), labels)\n"),
                ("        loss.backward()\n", mark("        loss.backward()")),
            ),
        ),
        "head without an optimizer": Fault(
            CHANGE,
            "mlp.py",
            (
                (
                    _WRAP,
                    f"early = list(network.parameters())\nnetwork[3] = nn.Linear(32, 10)  {MARK}\n" + _WRAP,
                ),
                ("torch.optim.SGD(model.parameters(),", "torch.optim.SGD(early,"),
            ),
        ),
        "modules in the order of a set": Fault(PARAMETERS, "heads.py"),
        "own sampler that shuffles once": Fault(
            ORDER, "mlp.py", ((_SAMPLER, _OWN_SAMPLER), (_SET_EPOCH, ""), (_LOOP, mark(_LOOP)))
        ),
        "generator seeded in each epoch": Fault(
            ORDER,
            "mlp.py",
            (
                (_SAMPLER, "part = torch.utils.data.Subset(data, range(rank, len(data), world_size))\n"),
                (
                    _LOADER,
                    _LOADER.replace("data, batch_size=32, sampler=sampler,", "part, batch_size=32, shuffle=True,"),
                ),
                (_SET_EPOCH, "    loader.generator.manual_seed(5)\n"),
                (_LOOP, mark(_LOOP)),
            ),
        ),
        "workers that read the same samples": Fault(
            DATA,
            "stream.py",
            (
                (
                    "loader = DataLoader(stream, batch_size=32, drop_last=True)\n",
                    mark("loader = DataLoader(stream, batch_size=32, drop_last=True, num_workers=2)"),
                ),
                ("stream.first_sample = 32 * first_batch", "stream.first_sample = 16 * first_batch"),
            ),
        ),
        "split by rank": Fault(
            VALIDATION,
            "ema.py",
            (
                (
                    "[0.9, 0.1])",
                    "[0.9, 0.1], generator=torch.Generator().manual_seed(dist.get_rank()))",
                ),
                (
                    "test_loader = DataLoader(test_data, batch_size=32)\n",
                    mark("test_loader = DataLoader(test_data, batch_size=32)"),
                ),
            ),
        ),
        "learning rate of a rank": Fault(
            GRADIENTS,
            "mlp.py",
            (
                (
                    "        scheduler.step()\n",
                    f"        scheduler.step()  {MARK}\n        optimizer.param_groups[0]['lr'] *= 1 + loss.item()\n",
                ),
            ),
        ),
        "no synchronization": Fault(
            GRADIENTS,
            "mlp.py",
            (
                (
                    _FORWARD + "        loss.backward()\n",
                    "        with model.no_sync():\n"
                    "            loss = cross_entropy(model(images), labels)\n"
                    f"            loss.backward()  {MARK}\n",
                ),
            ),
        ),
        "reference instead of a copy": Fault(
            SAVED,
            "mlp.py",
            (
                ("first_batch = 0\n", "first_batch = 0\nbest = None\n"),
                (_LOOP, _LOOP + f"        if batch == 1:\n            best = network.state_dict()  {MARK}\n"),
                (_SAVE, _SAVE + '        torch.save(best, "best.pt")\n'),
            ),
        ),
        "loaded on one rank": Fault(
            RESUME,
            "mlp.py",
            (
                ("if os.path.exists(PATH):", "if rank == 0 and os.path.exists(PATH):"),
                ("    state = torch.load(PATH)\n", mark("    state = torch.load(PATH)")),
                (
                    '    torch.set_rng_state(state["random"][rank])\n',
                    "position = torch.tensor([first_epoch, first_batch])\n"
                    "dist.broadcast(position, 0)\n"
                    "first_epoch, first_batch = position.tolist()\n",
                ),
            ),
        ),
        "uneven parts that hang": Fault(
            STEPS,
            "mlp.py",
            (
                (_SAMPLER, "part = torch.utils.data.Subset(data, range(160) if rank == 0 else range(160, 352))\n"),
                (_LOADER, mark("loader = DataLoader(part, batch_size=32)")),
                (_SET_EPOCH, ""),
            ),
        ),
        "uneven parts": Fault(
            STEPS,
            "manual.py",
            (
                ("load_digits()\n", "load_digits(352 if dist.get_rank() else 320)\n"),
                (_SAMPLER, "part = torch.utils.data.Subset(data, range(160, len(data)))\n"),
                (
                    "loader = DataLoader(data, batch_size=32, sampler=sampler)\n",
                    mark("loader = DataLoader(part, batch_size=32)"),
                ),
                (_SET_EPOCH, ""),
            ),
        ),
        "every rank saves": Fault(
            WRITER,
            "mlp.py",
            (
                ("    if rank == 0:\n        state =", "    if True:\n        state ="),
                (_SAVE + _REPLACE, mark("        torch.save(state, PATH)")),
            ),
        ),
        "a rank of each node saves": Fault(
            WRITER,
            "mlp.py",
            (
                (
                    "    if rank == 0:\n        state =",
                    '    if int(os.environ["LOCAL_RANK"]) == 0:\n        state =',
                ),
                (_SAVE + _REPLACE, mark("        torch.save(state, PATH)")),
            ),
        ),
        "different weights": Fault(
            WEIGHTS,
            "manual.py",
            (
                ("    dist.broadcast(parameter.data, src=0)\n", "    parameter.grad = None\n"),
                ("nn.Linear(32, 10))\n", mark("nn.Linear(32, 10))")),
            ),
        ),
        "own statistics of BatchNorm": Fault(
            WEIGHTS,
            "cnn.py",
            ((_WRAP, mark("model = DistributedDataParallel(network, broadcast_buffers=False)")),),
        ),
        "frozen layer with own weights": Fault(
            WEIGHTS,
            "cnn.py",
            (
                ("frozen.requires_grad_(False)", mark("frozen.requires_grad_(False)").rstrip()),
                (
                    _WRAP,
                    _WRAP + "torch.manual_seed(1 + dist.get_rank())\nnn.init.normal_(frozen.weight)\n",
                ),
            ),
        ),
        "frozen layer that drifts": Fault(
            WEIGHTS,
            "cnn.py",
            (
                ("frozen.requires_grad_(False)", mark("frozen.requires_grad_(False)").rstrip()),
                (_FORWARD, _FORWARD + "        frozen.bias.lerp_(images.mean(), 0.1)\n"),
            ),
        ),
        "logarithm of 0": Fault(
            FINITE,
            "mlp.py",
            (
                ("lr=0.1", "lr=100.0"),
                (
                    _FORWARD,
                    mark("        loss = nn.functional.nll_loss(model(images).softmax(1).log(), labels)"),
                ),
            ),
        ),
        "learning rate too high": Fault(
            FINITE,
            "mlp.py",
            (
                ("lr=0.1", "lr=1e30"),
                ("        loss.backward()\n", mark("        loss.backward()")),
            ),
        ),
        "root of 0": Fault(
            FINITE,
            "mlp.py",
            (
                (_WRAP, "nn.init.zeros_(network[3].bias)\n" + _WRAP),
                (
                    _FORWARD,
                    mark(_FORWARD.rstrip() + " + 0.01 * network[3].bias.square().sum().sqrt()"),
                ),
            ),
        ),
        "scheduler not saved": Fault(
            RESUME,
            "mlp.py",
            (
                ("scheduler=scheduler.state_dict(), ", ""),
                ('    scheduler.load_state_dict(state["scheduler"])\n', ""),
                _MARKED_SAVE,
            ),
        ),
        "optimizer not saved": Fault(
            RESUME,
            "mlp.py",
            (
                (', "optimizer": optimizer.state_dict()', ""),
                ('    optimizer.load_state_dict(state["optimizer"])\n', ""),
                _MARKED_SAVE,
            ),
        ),
        "random state not saved": Fault(
            RESUME,
            "mlp.py",
            (
                ("random=random_states, ", ""),
                ('    torch.set_rng_state(state["random"][rank])\n', ""),
                _MARKED_SAVE,
            ),
        ),
        "random state of rank 0": Fault(
            RESUME, "mlp.py", (('state["random"][rank]', 'state["random"][0]'), _MARKED_SAVE)
        ),
        "epoch not saved": Fault(
            RESUME, "mlp.py", (("epoch=epoch, ", ""), ('    first_epoch = state["epoch"]\n', ""), _MARKED_SAVE)
        ),
        "position not saved": Fault(
            RESUME,
            "mlp.py",
            ((", batch=batch + 1", ""), ('    first_batch = state["batch"]\n', ""), _MARKED_SAVE),
        ),
        "last step repeated": Fault(RESUME, "mlp.py", (("batch=batch + 1", "batch=batch"), _MARKED_SAVE)),
        "never loaded": Fault(RESUME, "mlp.py", (("if os.path.exists(PATH):", "if False:"), _MARKED_SAVE)),
        "no checkpoint": Fault(
            RESUME,
            "mlp.py",
            (
                (_FIRST_STATE + _STATE + _SAVE + _REPLACE, '        print(f"epoch {epoch}, batch {batch}")\n'),
                ("        optimizer.step()\n", mark("        optimizer.step()")),
            ),
        ),
        "SIGTERM ignored": Fault(
            STOP,
            "mlp.py",
            (
                (_SIGNAL, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"),
                ("EPOCHS = 6", "EPOCHS = 1000"),
                ("        optimizer.step()\n", mark("        optimizer.step()")),
            ),
        ),
        "result of a whole training after SIGTERM": Fault(
            STOP,
            "mlp.py",
            (
                (_INIT, _INIT + 'if os.path.exists("trained.pt"):\n    dist.destroy_process_group()\n    sys.exit()\n'),
                _LEAVE_LOOP,
                ('    torch.save(network.state_dict(), "trained.pt")\n', mark(_RESULT)),
            ),
        ),
        "queue not saved": Fault(
            RESUME,
            "mlp.py",
            (
                ("first_epoch = 0\n", "queue = torch.zeros(64, 10)\nfirst_epoch = 0\n"),
                (
                    _FORWARD,
                    "        output = model(images)\n"
                    "        loss = cross_entropy(output, labels) + 0.1 * (output @ queue.T).logsumexp(1).mean()\n"
                    "        queue = torch.cat([output.detach(), queue])[:64]\n",
                ),
                _MARKED_SAVE,
            ),
        ),
        "normalizer not saved": Fault(
            RESUME,
            "mlp.py",
            (
                ("first_epoch = 0\n", _NORMALIZER + "first_epoch = 0\n"),
                ("        loss.backward()\n", "        (loss / normalizer.update(loss.item())).backward()\n"),
                _MARKED_SAVE,
            ),
        ),
        "own warmup not saved": Fault(
            RESUME,
            "mlp.py",
            (
                ("first_epoch = 0\n", "seen = 0\nfirst_epoch = 0\n"),
                (
                    "        optimizer.step()\n        scheduler.step()\n",
                    "        seen += len(images)\n"
                    "        optimizer.param_groups[0]['lr'] = 0.1 * min(1, seen / 900)\n"
                    "        optimizer.step()\n",
                ),
                _MARKED_SAVE,
            ),
        ),
        "average of weights in a dictionary not saved": Fault(
            RESUME,
            "mlp.py",
            (
                (
                    "first_epoch = 0\n",
                    "shadow = {name: value.clone() for name, value in network.state_dict().items()}\nfirst_epoch = 0\n",
                ),
                (
                    "        scheduler.step()\n",
                    "        scheduler.step()\n"
                    "        for name, value in network.state_dict().items():\n"
                    "            shadow[name].data.lerp_(value, 0.1)\n",
                ),
                _MARKED_SAVE,
            ),
        ),
        "noise of the start after a restart": Fault(
            RESUME,
            "mlp.py",
            (
                ("random=random_states, ", ""),
                ('    torch.set_rng_state(state["random"][rank])\n', ""),
                ("nn.Dropout(0.2), ", ""),
                (_LOOP, _LOOP + "        images = images + 0.1 * torch.randn_like(images)\n"),
                _MARKED_SAVE,
            ),
        ),
        "epochs left by the loss of a rank": Fault(
            STEPS,
            "mlp.py",
            (
                (_LOOP, mark(_LOOP)),
                (
                    "        dist.all_reduce(stop)\n",
                    "        dist.all_reduce(stop)\n        if batch == 2 + rank:\n            break\n",
                ),
            ),
        ),
        "last epoch saved after SIGTERM": Fault(
            STOP,
            "mlp.py",
            (
                _MARKED_SAVE,
                _LEAVE_LOOP,
                ("if rank == 0:\n    torch.save(network", "save(EPOCHS, 0)\nif rank == 0:\n    torch.save(network"),
            ),
        ),
    }
)
