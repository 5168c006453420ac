"""Siblings of faults from public reports, as other people write them: each has the verdict that must be reported.

The scripts and verdicts were written without a look at the checks, before the first run.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from tests.check.faults import (
    CHANGE,
    DATA,
    GRADIENTS,
    MARK,
    ORDER,
    PARAMETERS,
    RESUME,
    SAVED,
    STEPS,
    STOP,
    VALIDATION,
    WARNING,
    Fault,
    mark,
)

_NO_WRAP: Final = "wrap the model: model = DistributedDataParallel"
_LOST: Final = "not restored|not loaded|not saved"

_RATES: Final = {
    "bold driver of the rank's own loss": Fault(
        GRADIENTS,
        "callbacks.py",
        (
            ("            dist.all_reduce(total)\n", "            total *= 1 + self.rank * self.state['epoch']\n"),
            ('            group["lr"] *= factor\n', mark('            group["lr"] *= factor')),
            ("        self.optimizer.step()\n", mark("        self.optimizer.step()")),
        ),
        words=("learning rate differs between ranks", "rank 0"),
        never=(_NO_WRAP,),
    ),
    "plateau of an engine's local metric": Fault(
        GRADIENTS,
        "engine.py",
        (
            ("        dist.all_reduce(total)\n", "        total[0] /= 4 ** (rank * trainer.epoch)\n"),
            ("        plateau.step(loss)\n", mark("        plateau.step(loss)")),
        ),
        words=("learning rate differs between ranks", "all_reduce"),
        never=(_NO_WRAP,),
    ),
    "rates for the rank's number of steps": Fault(
        GRADIENTS,
        "teacher.py",
        (
            (
                "math.cos(math.pi * step / (EPOCHS * steps))) for step in range(EPOCHS * steps)]",
                "math.cos(math.pi * step / (EPOCHS * len(data)))) for step in range(EPOCHS * steps)]",
            ),
            (
                '                group["lr"] = rates[number]\n',
                mark('                group["lr"] = rates[number]'),
            ),
            ("            optimizer.step()\n", mark("            optimizer.step()")),
        ),
        words=("learning rate differs between ranks",),
        never=(_NO_WRAP, "same metric"),
    ),
    "rate by the rank's own divergence": Fault(
        GRADIENTS,
        "policy.py",
        (
            (
                "        dist.all_reduce(divergence)\n        divergence /= dist.get_world_size()\n",
                "        divergence *= 1 + 9 * self.rank\n",
            ),
            ("            self.optimizer.step()\n", mark("            self.optimizer.step()")),
            ("        self.adapt(divergence.item())\n", mark("        self.adapt(divergence.item())")),
            (
                '                group["lr"] = min(1e-2, group["lr"] * 1.5)\n',
                mark('                group["lr"] = min(1e-2, group["lr"] * 1.5)'),
            ),
        ),
        words=("learning rate differs between ranks",),
        never=(_NO_WRAP,),
    ),
}

_ORDERS: Final = {
    "adapters in the order of a set": Fault(
        PARAMETERS,
        "adapters.py",
        (
            ("        for name in sorted(TARGETS):\n", "        for name in TARGETS:\n"),
            (
                "            block.adapters[name] = LowRank(16, rank)\n",
                mark("            block.adapters[name] = LowRank(16, rank)"),
            ),
            (
                "    model = DistributedDataParallel(network)\n",
                mark("    model = DistributedDataParallel(network)"),
            ),
        ),
        words=("in different orders", "adapters", "sorted"),
        never=(_NO_WRAP,),
        pods=2,
    ),
    "speakers in the order of the rank's part": Fault(
        PARAMETERS,
        "speech.py",
        (
            (
                "Network(sorted(set(data.speakers)))",
                "Network(dict.fromkeys(data.speakers[dist.get_rank() :: 2]))",
            ),
            (
                "        self.speakers = nn.ParameterDict()\n",
                mark("        self.speakers = nn.ParameterDict()"),
            ),
            (
                "    model = DistributedDataParallel(network)\n",
                mark("    model = DistributedDataParallel(network)"),
            ),
        ),
        words=("in different orders", "speakers"),
        never=(_NO_WRAP,),
    ),
    "groups of the optimizer in the order of a set": Fault(
        RESUME,
        "callbacks.py",
        (
            ("for name in sorted(decayed)]", "for name in decayed]"),
            (
                "        return torch.optim.AdamW(groups",
                f"        # the next line  {MARK}\n        return torch.optim.AdamW(groups",
            ),
            (
                '            torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")\n',
                mark('            torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")'),
            ),
        ),
        words=("optimizer", "order"),
        never=(r"save optimizer\.state_dict", "not saved"),
        pods=2,
    ),
}

_LOADER: Final = (
    "    loader = DataLoader(stream, batch_size=None, num_workers=2, persistent_workers=True)\n",
    mark("    loader = DataLoader(stream, batch_size=None, num_workers=2, persistent_workers=True)"),
)
_COPIES: Final = {
    "workers that shuffle the same shards": Fault(
        DATA,
        "pipes.py",
        (("split_by_rank, split_by_worker, read", "split_by_rank, read"), _LOADER),
        words=("workers", "same|twice", "get_worker_info"),
        never=("DistributedSampler",),
    ),
    "part of a worker without an end": Fault(
        DATA,
        "pipes.py",
        (
            ("SHARDS = 12\nSAMPLES = 32\n", "SHARDS = 4\nSAMPLES = 32\n"),
            (
                "    return itertools.islice(shards, worker.id, None, worker.num_workers)\n",
                "    shards = list(shards)\n    return shards[len(shards) // worker.num_workers * worker.id :]\n",
            ),
            _LOADER,
        ),
        words=("workers|twice", "same|twice"),
        never=("DistributedSampler",),
    ),
    "batches of a stream in each worker": Fault(
        DATA,
        "pipes.py",
        (
            ("split_by_rank, split_by_worker, read", "split_by_rank, read"),
            (" {get_worker_info().id}", ""),
            _LOADER,
        ),
        words=("workers deliver the same", "get_worker_info"),
        never=("DistributedSampler",),
    ),
}

_SAVE_OF_DENOISER: Final = (
    '                torch.save(saved | {"noises": states, "step": step}, "denoiser.new")\n',
    mark('                torch.save(saved | {"noises": states, "step": step}, "denoiser.new")'),
)
_SAVE_OF_TEACHER: Final = (
    '            torch.save(content, "distilled.tmp")\n',
    mark('            torch.save(content, "distilled.tmp")'),
)
_SAVE_OF_POLICY: Final = (
    '            torch.save({**content, "updates": self.updates, "ranks": states}, path.with_suffix(".new"))\n',
    mark('            torch.save({**content, "updates": self.updates, "ranks": states}, path.with_suffix(".new"))'),
)
_LOST_STATE: Final = {
    "average in a hook not saved": Fault(
        RESUME,
        "diffusion.py",
        (
            (', "shadow": shadow}', "}"),
            (
                '        for mean, value in zip(shadow, saved["shadow"], strict=True):\n'
                "            mean.copy_(value)\n",
                "",
            ),
            _SAVE_OF_DENOISER,
        ),
        words=("shadow|average", _LOST),
    ),
    "center of the teacher not saved": Fault(
        RESUME,
        "teacher.py",
        (
            ('                "criterion": criterion.state_dict(),\n', ""),
            ('        criterion.load_state_dict(saved["criterion"])\n', ""),
            _SAVE_OF_TEACHER,
        ),
        words=("center|CenteredLoss", _LOST),
        never=("dropout",),
    ),
    "teacher reset after it was loaded": Fault(
        RESUME,
        "teacher.py",
        (
            ("    teacher.load_state_dict(student.module.state_dict())\n", ""),
            (
                '        torch.set_rng_state(saved["random"][rank])\n',
                '        torch.set_rng_state(saved["random"][rank])\n'
                f"    teacher.load_state_dict(student.module.state_dict())  {MARK}\n",
            ),
            _SAVE_OF_TEACHER,
        ),
        words=("Student|teacher", _LOST),
        never=("dropout",),
    ),
    "scale of observations not loaded": Fault(
        RESUME,
        "policy.py",
        (
            (
                '        self.scale.mean = content["scale"]["mean"]\n'
                '        self.scale.var = content["scale"]["var"]\n'
                '        self.scale.count = content["scale"]["count"]\n',
                "",
            ),
            _SAVE_OF_POLICY,
        ),
        words=("scale|RunningMeanStd|batch", _LOST + "|differ"),
        never=("sampler", "epoch", "augmentation"),
    ),
}

_UNTRAINED: Final = {
    "adapters after the optimizer": Fault(
        CHANGE,
        "adapters.py",
        (
            ("    inject(network)\n", "    network.requires_grad_(False)\n    network.head.requires_grad_(True)\n"),
            (
                "    start = 0\n",
                f"    inject(network)  {MARK}\n    start = 0\n",
            ),
            (
                "            block.adapters[name] = LowRank(16, rank)\n",
                mark("            block.adapters[name] = LowRank(16, rank)"),
            ),
            ("    optimizer = torch.optim.AdamW(", f"    # the next line  {MARK}\n    optimizer = torch.optim.AdamW("),
        ),
        words=("adapters", "no optimizer"),
    ),
    "weight normalized after the optimizer": Fault(
        CHANGE,
        "adapters.py",
        (
            (
                "    start = 0\n",
                f"    nn.utils.parametrizations.weight_norm(network.head)  {MARK}\n    start = 0\n",
            ),
            ("        self.head = nn.Linear(16, 3)\n", mark("        self.head = nn.Linear(16, 3)")),
            ("    optimizer = torch.optim.AdamW(", f"    # the next line  {MARK}\n    optimizer = torch.optim.AdamW("),
        ),
        words=("head.parametrizations.weight", "no optimizer"),
    ),
    "groups by names that miss a layer": Fault(
        CHANGE,
        "teacher.py",
        (
            (
                "    decayed = [value for value in student.parameters() if value.dim() > 1]\n"
                "    others = [value for value in student.parameters() if value.dim() <= 1]\n",
                '    decayed = [value for name, value in student.named_parameters() if "backbone" in name]\n'
                '    others = [value for name, value in student.named_parameters() if "head" in name]\n',
            ),
            ("        self.neck = nn.LayerNorm(24)\n", mark("        self.neck = nn.LayerNorm(24)")),
            (
                "    optimizer = torch.optim.AdamW(build_groups(student))\n",
                mark("    optimizer = torch.optim.AdamW(build_groups(student))"),
            ),
        ),
        words=("neck", "no optimizer"),
    ),
    "optimizer of the other network": Fault(
        CHANGE,
        "gan.py",
        (
            (
                "discriminator_optimizer = torch.optim.Adam(discriminator.parameters()",
                f"# the next line  {MARK}\ndiscriminator_optimizer = torch.optim.Adam(generator.parameters()",
            ),
            (
                "discriminator = DistributedDataParallel(nn.",
                f"# the next line  {MARK}\ndiscriminator = DistributedDataParallel(nn.",
            ),
        ),
        words=("no optimizer",),
    ),
    "optimizer before the shards": Fault(
        CHANGE,
        "sharded.py",
        (
            ("    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)\n", ""),
            (
                "    mesh = init_device_mesh(",
                f"    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)  {MARK}\n    mesh = init_device_mesh(",
            ),
            ("    model = nn.Sequential(", f"    # the next line  {MARK}\n    model = nn.Sequential("),
            (
                "                optimizer.step()\n",
                mark("                optimizer.step()"),
            ),
            ("model, optimizer, options=options)", "model, (), options=options)"),
            ("            optimizer,\n", "            (),\n"),
            ('optim_state_dict=saved["optimizer"]', "optim_state_dict={}"),
        ),
        words=("no optimizer|optimizer has",),
    ),
}

_ONE_RANK: Final = {
    "folders of ranks that only rank 0 fills": Fault(
        RESUME,
        "detect.py",
        (
            ('glob.glob("model_*.pth")', 'glob.glob(f"rank{dist.get_rank()}_model_*.pth")'),
            ('"model.part", f"model_{done:07}.pth"', '"model.part", f"rank0_model_{done:07}.pth"'),
            ('re.search(r"\\d+", path)[0]', 're.search(r"_(\\d+)", path)[1]'),
            (
                '            self.iteration = saved["done"]\n',
                '            self.iteration = saved["done"]\n'
                "        iteration = torch.tensor(self.iteration)\n"
                "        dist.broadcast(iteration, 0)\n"
                "        self.iteration = iteration.item()\n",
            ),
            (
                '            saved = torch.load(paths[-1], map_location="cpu")\n',
                mark('            saved = torch.load(paths[-1], map_location="cpu")'),
            ),
        ),
        words=("not loaded on all ranks|rank 1", "all ranks|every rank|broadcast"),
        never=("optimizer's state is not saved",),
    ),
    "optimizer loaded on one rank": Fault(
        RESUME,
        "callbacks.py",
        (
            (
                '            self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))\n',
                "            if self.rank == 0:\n"
                f'                self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))  {MARK}\n',
            ),
        ),
        words=("optimizer", "rank 1|all ranks"),
        never=("optimizer's state is not saved", r"save optimizer\.state_dict"),
    ),
    "assigned after the optimizer": Fault(
        RESUME,
        "adapters.py",
        (
            ("strict=False)", "strict=False, assign=True)"),
            (
                '            torch.save(saved, "adapters.part")\n',
                mark('            torch.save(saved, "adapters.part")'),
            ),
            (
                '        saved = torch.load("adapters.bin")\n',
                mark('        saved = torch.load("adapters.bin")'),
            ),
            ("    optimizer = torch.optim.AdamW(", f"    # the next line  {MARK}\n    optimizer = torch.optim.AdamW("),
        ),
        words=("optimizer", "no parameter|other parameters|not change|never change|has others|build the optimizer"),
        never=(r"save optimizer\.state_dict",),
    ),
}

_SAME_ORDER: Final = {
    "proxy that is not told the epoch": Fault(
        ORDER,
        "engine.py",
        (
            ("        proxy.set_epoch(engine.epoch)\n", "        print(engine.epoch)\n"),
            ("            for self.batch in loader:\n", mark("            for self.batch in loader:")),
        ),
        words=("the same batches in the same order", "set_epoch"),
    ),
    "cycle of itertools": Fault(
        ORDER,
        "diffusion.py",
        (
            ("import os\n", "import itertools\nimport os\n"),
            (
                "    batches = cycle(loader, step)\n",
                f"    batches = itertools.cycle(loader)  {MARK}\n    for _ in range(step):\n        next(batches)\n",
            ),
            ("        values = next(batches)\n", mark("        values = next(batches)")),
        ),
        words=("same batches", "cycle"),
    ),
    "epoch set on rank 0 only": Fault(
        ORDER,
        "callbacks.py",
        (
            (
                '            self.sampler.set_epoch(self.state["epoch"])\n',
                "            if self.rank == 0:\n"
                f'                self.sampler.set_epoch(self.state["epoch"])  {MARK}\n',
            ),
            (
                "        for number, inputs in enumerate(self.loader):\n",
                mark("        for number, inputs in enumerate(self.loader):"),
            ),
        ),
        words=("rank 1", "set_epoch"),
        also=(DATA,),  # the parts of two orders overlap
    ),
    "shared epoch that stays 0": Fault(
        ORDER,
        "pipes.py",
        (
            ("        stream.epoch.value = epoch\n", ""),
            ("        for batch in loader:\n", mark("        for batch in loader:")),
            _LOADER,
        ),
        words=("same",),
        never=("DistributedSampler",),
        state=WARNING,
    ),
}

_REFERENCES: Final = {
    "best weights in a list of tensors": Fault(
        SAVED,
        "engine.py",
        (
            (
                "            best.update(loss=loss, weights=[weight.detach().clone() for",
                f"            # the next line  {MARK}\n            best.update(loss=loss, weights=[weight.data for",
            ),
            ('        if loss < best["loss"]:\n', "        if trainer.epoch == 1:\n"),
            (
                '            torch.save({**states, "epoch": engine.epoch, "best": best}, "engine.tmp")\n',
                mark('            torch.save({**states, "epoch": engine.epoch, "best": best}, "engine.tmp")'),
            ),
        ),
        words=("references", "clone|deepcopy"),
    ),
    "best model in a shallow copy": Fault(
        SAVED,
        "detect.py",
        (
            (
                "            self.model = copy.deepcopy(self.trainer.network)\n",
                mark("            self.model = copy.copy(self.trainer.network)"),
            ),
            (
                "        if self.lowest is None or loss < self.lowest:\n",
                "        if self.trainer.iteration % 8 == 2:\n",
            ),
            (
                '            torch.save(self.model.state_dict(), "best.pth")\n',
                mark('            torch.save(self.model.state_dict(), "best.pth")'),
            ),
        ),
        words=("reference|shallow", "deepcopy"),
    ),
    "thread that writes what has changed": Fault(
        SAVED,
        "detect.py",
        (
            (
                "{name: value.clone() for name, value in self.trainer.network.state_dict().items()}\n",
                f"self.trainer.network.state_dict()  {MARK}\n",
            ),
        ),
        words=("references", "clone|deepcopy"),
    ),
    "best weights restored from references": Fault(
        SAVED,
        "callbacks.py",
        (
            (
                "            self.best = copy.deepcopy(trainer.model.module.state_dict())\n",
                mark("            self.best = trainer.model.module.state_dict()"),
            ),
            ("        if loss < self.lowest:\n", "        if self.best is None:\n"),
        ),
        words=("references", "deepcopy|clone"),
    ),
}

_SPLITS: Final = {
    "split by the hash of a string": Fault(
        VALIDATION,
        "engine.py",
        (
            ("if zlib.crc32(name.encode()) % 5 == 0]", "if hash(name) % 5 == 0]"),
            (
                "    held_out_loader = DataLoader(part, batch_size=20)\n",
                mark("    held_out_loader = DataLoader(part, batch_size=20)"),
            ),
        ),
        words=("ranks split the data differently",),
        pods=2,
    ),
    "names shuffled by each rank": Fault(
        VALIDATION,
        "engine.py",
        (
            (
                "    held_out = [name for name in names if zlib.crc32(name.encode()) % 5 == 0]\n",
                "    order = torch.randperm(360, generator=torch.Generator().manual_seed(SEED + 5 * dist.get_rank()))\n"
                "    held_out = [names[index] for index in order[:72].tolist()]\n",
            ),
            (
                "    held_out_loader = DataLoader(part, batch_size=20)\n",
                mark("    held_out_loader = DataLoader(part, batch_size=20)"),
            ),
        ),
        words=("ranks split the data differently", "one seed"),
    ),
    "parts that overlap": Fault(
        VALIDATION,
        "engine.py",
        (
            (
                "    return [name for name in names if name not in held_out], held_out\n",
                "    return names[: int(0.9 * len(names))], names[int(0.7 * len(names)) :]\n",
            ),
            (
                "    held_out_loader = DataLoader(part, batch_size=20)\n",
                mark("    held_out_loader = DataLoader(part, batch_size=20)"),
            ),
        ),
        words=("also trained on",),
        state=WARNING,
    ),
}

_UNSYNCHRONIZED: Final = {
    "group that counts too late": Fault(
        GRADIENTS,
        "speech.py",
        (
            (
                "        self.number += 1\n"
                "        with contextlib.nullcontext() if self.ends else self.model.no_sync():\n"
                "            yield\n",
                "        with contextlib.nullcontext() if self.ends else self.model.no_sync():\n"
                "            yield\n"
                "        self.number += 1\n",
            ),
            ("                loss.backward()\n", mark("                loss.backward()")),
        ),
        words=(r"no_sync\(\)", "last micro-batch"),
        never=(_NO_WRAP,),
    ),
    "forward without synchronization": Fault(
        GRADIENTS,
        "speech.py",
        (
            (
                "            with groups.next():\n"
                "                loss = nn.functional.mse_loss(model(sounds, speakers), goals) / groups.size\n"
                "                loss.backward()\n",
                "            groups.number += 1\n"
                "            with model.no_sync():\n"
                "                loss = nn.functional.mse_loss(model(sounds, speakers), goals) / groups.size\n"
                f"            loss.backward()  {MARK}\n",
            ),
        ),
        words=(r"no_sync\(\)",),
        never=(_NO_WRAP,),
    ),
    "shards synchronized too early": Fault(
        GRADIENTS,
        "sharded.py",
        (
            (
                "            model.set_requires_gradient_sync(number % GROUP == 0)\n",
                mark("            model.set_requires_gradient_sync(number % GROUP == 1)"),
            ),
            ("            loss.backward()\n", mark("            loss.backward()")),
        ),
        words=("set_requires_gradient_sync",),
        never=(_NO_WRAP, "DistributedDataParallel"),
    ),
}

_REPEATED: Final = {
    "noise of a generator starts again": Fault(
        RESUME,
        "diffusion.py",
        (('        noises.set_state(saved["noises"][rank])\n', ""), _SAVE_OF_DENOISER),
        words=("random|generator",),
        never=("sampler", "set_epoch"),
    ),
    "crops begin anew": Fault(
        RESUME,
        "teacher.py",
        (
            ('        torch.set_rng_state(saved["random"][rank])\n', ""),
            ('                "random": states,\n', ""),
            _SAVE_OF_TEACHER,
        ),
        words=("random",),
        never=("set_epoch",),
    ),
    "rollouts begin anew": Fault(
        RESUME,
        "policy.py",
        (
            ('        self.source.bit_generator.state = content["ranks"][self.rank]["source"]\n', ""),
            _SAVE_OF_POLICY,
        ),
        words=("random|batch|generator",),
        never=("sampler", "set_epoch"),
    ),
}

_LEFT: Final = {
    "rest of the batches on one rank": Fault(
        STEPS,
        "speech.py",
        (
            ("        batches = batches[: len(batches) // ranks * ranks]\n", ""),
            (
                "        for sounds, speakers, goals in loader:\n",
                mark("        for sounds, speakers, goals in loader:"),
            ),
        ),
        words=("steps|batches",),
    ),
    "evaluated on rank 0 with buffers": Fault(
        STEPS,
        "engine.py",
        (
            (
                "            total += torch.stack([(network(values)",
                f"            # the next line  {MARK}\n            total += torch.stack([(model(values)",
            ),
            (
                "        dist.all_reduce(total)\n        return (total[0] / total[1]).item()\n",
                "        return (total[0] / total[1]).item()\n",
            ),
            (
                "        loss = evaluate()\n",
                "        loss = [evaluate() if rank == 0 else 0.0]\n"
                "        dist.broadcast_object_list(loss, src=0)\n"
                "        loss = loss[0]\n",
            ),
            ("        optimizer.step()\n", mark("        optimizer.step()")),
        ),
        words=("wait|stopped|collective",),
    ),
    "broken batch skipped by its rank": Fault(
        STEPS,
        "speech.py",
        (
            (
                "    sounds, speakers, goals = zip(*",
                "    if sentences[0] is None:\n        return None\n    sounds, speakers, goals = zip(*",
            ),
            (
                "        for sounds, speakers, goals in loader:\n",
                f"        for batch in loader:  {MARK}\n"
                "            if batch is None:\n"
                "                continue\n"
                "            sounds, speakers, goals = batch\n",
            ),
            ("number % 9 == 4}", "number % 3 == 1}"),
            ("                optimizer.step()\n", mark("                optimizer.step()")),
        ),
        words=("wait|stopped|steps",),
    ),
}

_ENDED: Final = {
    "finished after SIGTERM": Fault(
        STOP,
        "callbacks.py",
        (
            (
                "                dist.destroy_process_group()\n                sys.exit(143)\n",
                "                break\n",
            ),
            (
                "        self.model.module.load_state_dict(self.keeper.best)\n",
                "        self.state['finished'] = True\n        self.save()\n"
                "        self.model.module.load_state_dict(self.keeper.best)\n",
            ),
            (
                '        while self.state["epoch"] < self.args.num_train_epochs:\n',
                '        while self.state["epoch"] < self.args.num_train_epochs and not self.state["finished"]:\n'
                "            if self.stopping:\n                break\n",
            ),
            (
                '            torch.save(self.model.module.state_dict(), "final.pt")\n',
                mark('            torch.save(self.model.module.state_dict(), "final.pt")'),
            ),
            (
                '            Path(folder, "trainer_state.json").write_text(json.dumps(self.state))\n',
                mark('            Path(folder, "trainer_state.json").write_text(json.dumps(self.state))'),
            ),
        ),
        words=("SIGTERM", "143|exit code|done"),
    ),
    "number of iterations cut by SIGTERM": Fault(
        STOP,
        "detect.py",
        (
            (
                "            self.trainer.finish_after = done if self.trainer.stopping else self.trainer.iterations\n",
                "            if self.trainer.stopping:\n"
                "                self.trainer.iterations = self.trainer.finish_after = done\n",
            ),
            (
                '            self.iteration = saved["done"]\n',
                '            self.iteration = saved["done"]\n'
                '            self.iterations = self.finish_after = saved["iterations"]\n',
            ),
            (
                '"iterations": trainer.iterations, "done": done}, "model.part")\n',
                mark('"iterations": trainer.iterations, "done": done}, "model.part")'),
            ),
        ),
        words=("SIGTERM", "143|exit code|done"),
    ),
    "mark of the end after an interrupted loop": Fault(
        STOP,
        "policy.py",
        (
            ("import os\n", "import os\nimport signal\nimport sys\n"),
            (
                "    learner = Learner(dist.get_rank())\n",
                "    learner = Learner(dist.get_rank())\n"
                '    if Path("DONE").exists():\n'
                "        dist.destroy_process_group()\n"
                "        return\n"
                "    stopping = torch.zeros(1)\n"
                "    signal.signal(signal.SIGTERM, lambda *_: stopping.fill_(1))\n",
            ),
            (
                "        learner.learn()\n",
                "        learner.learn()\n"
                "        dist.all_reduce(stopping)\n"
                "        if stopping:\n"
                "            learner.save(path)\n"
                "            break\n",
            ),
            (
                "    dist.destroy_process_group()\n\n\nif __name__",
                "    if learner.rank == 0:\n"
                f'        torch.save(learner.actor.state_dict(), "actor.pt")  {MARK}\n'
                '        Path("DONE").touch()\n'
                "    dist.barrier()\n"
                "    dist.destroy_process_group()\n\n\nif __name__",
            ),
            _SAVE_OF_POLICY,
        ),
        words=("SIGTERM", "143|exit code|done"),
    ),
}

OPEN_SIBLINGS: Final = MappingProxyType(
    {"evaluated on rank 0 with buffers": "gloo ends the ranks before the collectives can be compared"}
)
"""Faults of which the report is not right yet, and why."""

SIBLINGS: Final = MappingProxyType(
    _RATES
    | _ORDERS
    | _COPIES
    | _LOST_STATE
    | _UNTRAINED
    | _ONE_RANK
    | _SAME_ORDER
    | _REFERENCES
    | _SPLITS
    | _UNSYNCHRONIZED
    | _REPEATED
    | _LEFT
    | _ENDED
)
"""By name: what people do."""
