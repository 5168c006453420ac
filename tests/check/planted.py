"""Faults of public reports in scripts of different styles: each has the verdict that `ddp check` must report.

The verdicts were written before the first run. `faults` has the kinds of faults that the checks were built with.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from tests.check.faults import (
    CHANGE,
    DATA,
    FINITE,
    GRADIENTS,
    MARK,
    ORDER,
    PARAMETERS,
    RANDOM,
    RESUME,
    SAVED,
    STEPS,
    VALIDATION,
    WARNING,
    WEIGHTS,
    WRITER,
    Fault,
    mark,
)

# -- data


_DATA: Final = {
    "batch sampler without its epoch": Fault(
        ORDER,
        "bucket.py",
        (
            ("        batches.set_epoch(done)\n", ""),
            ("        for values, labels in loader:\n", mark("        for values, labels in loader:")),
        ),
        words=("the same batches in the same order", "batch_sampler"),
    ),
    "epoch set after the iterator": Fault(
        ORDER,
        "bucket.py",
        (
            (
                "        batches.set_epoch(done)\n",
                f"        delivered = iter(loader)  {MARK}\n        batches.set_epoch(done)\n",
            ),
            ("        for values, labels in loader:\n", "        for values, labels in delivered:\n"),
        ),
        words=("epochs 1 and 2 have the same batches",),
        also=(RESUME,),  # after a restart the first epoch has that order too
    ),
    "each rank shuffles for itself": Fault(
        DATA,
        "bucket.py",
        (
            ("random.Random(1000 * SEED + self.epoch)", "random.Random(1000 * SEED + 10 * self.epoch + self.rank)"),
            ("batches = BucketBatches(", f"batches = BucketBatches(  {MARK}\n        "),
            (
                "    loader = DataLoader(sequences, batch_sampler=batches, collate_fn=collate)\n",
                mark("    loader = DataLoader(sequences, batch_sampler=batches, collate_fn=collate)"),
            ),
        ),
        words=("both train on", "one order"),
        state=WARNING,
    ),
    "whole data shuffled by each rank": Fault(
        DATA,
        "curriculum.py",
        (
            (
                "    sampler = DistributedSampler(data, shuffle=True, drop_last=True)\n    sampler.set_epoch(epoch)\n",
                "",
            ),
            (
                "    return DataLoader(data, batch_size=16 + 8 * epoch, sampler=sampler, drop_last=True)\n",
                "    generator = torch.Generator().manual_seed(100 * SEED + 2 * epoch + dist.get_rank())\n"
                f"    return DataLoader(data, 32, shuffle=True, generator=generator, drop_last=True)  {MARK}\n",
            ),
        ),
        words=("both train on", "one order"),
        state=WARNING,
    ),
    "shards for each rank only": Fault(
        DATA,
        "shards.py",
        (
            ("            shards = shards[worker.id :: worker.num_workers]\n", "            pass\n"),
            (
                "    source = random.Random(f",
                "    source = random.Random(SEED + self.epoch) if worker else random.Random(f",
            ),
            ("loader = DataLoader(stream, ", f"loader = DataLoader(  {MARK}\n    stream, "),
        ),
        words=("workers deliver the same", "get_worker_info"),
    ),
    "shards for each worker only": Fault(
        DATA,
        "shards.py",
        (
            ("        shards = shards[self.rank :: self.ranks]\n", ""),
            ("{self.epoch} {self.rank} {number}", "{self.epoch} {number}"),
            ("loader = DataLoader(stream, ", f"loader = DataLoader(  {MARK}\n    stream, "),
        ),
        words=("ranks get the same batch",),
        never=("DistributedSampler",),
    ),
    "workers that keep the first epoch": Fault(
        ORDER,
        "shards.py",
        (
            ("loader = DataLoader(stream, ", f"loader = DataLoader(  {MARK}\n    stream, persistent_workers=True, "),
            ('    stream.skipped = position["batches"] // 2\n', ""),
            ("        if number == 4:\n            save(epoch, number)\n", ""),
        ),
        words=("the workers keep the copy of the first epoch", "persistent_workers=False"),
        also=(RESUME,),  # new workers after a restart have the right epoch
    ),
    "new loader with a new seed": Fault(
        ORDER,
        "curriculum.py",
        (
            ("    sampler.set_epoch(epoch)\n", ""),
            ("16 + 8 * epoch", "32"),
            (
                "    for images, labels in build_loader",
                f"    # the next line  {MARK}\n    for images, labels in build_loader",
            ),
        ),
        words=("the same batches in the same order", "set_epoch"),
    ),
    "batches that grow with the rank": Fault(
        STEPS,
        "curriculum.py",
        (
            ("batch_size=16 + 8 * epoch", "batch_size=80 * (1 + dist.get_rank())"),
            ("    return DataLoader", f"    # the next line  {MARK}\n    return DataLoader"),
        ),
        words=("batches per epoch",),
    ),
    "environment with one seed": Fault(
        DATA,
        "replay.py",
        (
            ("random.Random(1000 * SEED + rank)", "random.Random(1000 * SEED)"),
            ("Environment(2000 * SEED + rank + 7)", "Environment(2000 * SEED + 7)"),
            (
                "        expected = self.model(places)",
                f"        # the next line  {MARK}\n        expected = self.model(places)",
            ),
        ),
        words=("ranks get the same batch",),
        never=("DistributedSampler", "DataLoader"),
    ),
    "batches drawn by one seed": Fault(
        DATA,
        "drawn.py",
        (
            ("manual_seed(10 * SEED + rank)", "manual_seed(10 * SEED)"),
            ("    loss = cross_entropy(model", f"    # the next line  {MARK}\n    loss = cross_entropy(model"),
        ),
        words=("ranks get the same batch",),
        never=("DistributedSampler", "DataLoader"),
    ),
    "split by the rank's own order": Fault(
        VALIDATION,
        "validated.py",
        (
            (
                "generator=torch.Generator().manual_seed(SEED)).tolist()",
                "generator=torch.Generator().manual_seed(SEED + dist.get_rank())).tolist()",
            ),
            ("held_out_loader = DataLoader", f"# the next line  {MARK}\nheld_out_loader = DataLoader"),
        ),
        words=("ranks split the data differently", "one seed"),
    ),
    "validation on training data": Fault(
        VALIDATION,
        "validated.py",
        (
            ("Subset(data, order[512:])", "Subset(data, order[:128])"),
            (
                "held_out_loader = DataLoader(held_out, batch_size=32, ",
                f"held_out_loader = DataLoader(  {MARK}\n    held_out, batch_size=32, ",
            ),
        ),
        words=("are also trained on",),
        state=WARNING,
    ),
}

# -- model


_MODEL: Final = {
    "unfrozen after wrapping": Fault(
        GRADIENTS,
        "unfreeze.py",
        (
            ("        model = wrap(network, epoch)\n", mark("        network.body.requires_grad_(True)")),
            ("model = wrap(network, first)", f"model = wrap(network, first)  {MARK}"),
            ("    return DistributedDataParallel(network)\n", mark("    return DistributedDataParallel(network)")),
        ),
        words=("body", "requires_grad|before .*wrap|after .*wrap"),
        never=("wrap the model: model = DistributedDataParallel",),
    ),
    "optimizer of what was trainable": Fault(
        CHANGE,
        "unfreeze.py",
        (
            (
                'groups = [{"params": network.body.parameters(), "lr": 1e-3}, '
                '{"params": network.head.parameters(), "lr": 1e-2}]\n',
                "network.body.requires_grad_(False)\n"
                "groups = [weight for weight in network.parameters() if weight.requires_grad]\n",
            ),
            (
                "self.body = nn.Sequential(nn.Linear(64, 32), nn.Tanh())",
                f"self.body = nn.Sequential(nn.Linear(64, 32), nn.Tanh())  {MARK}",
            ),
        ),
        words=("body", "no optimizer has them"),
    ),
    "network called beside its wrapper": Fault(
        GRADIENTS,
        "unfreeze.py",
        (
            (
                "        loss = cross_entropy(model(images), labels)\n",
                mark("        loss = cross_entropy(network(images), labels)"),
            ),
        ),
        words=("different gradients",),
        never=("wrap the model: model = DistributedDataParallel",),
    ),
    "method of the wrapped module": Fault(
        GRADIENTS,
        "unfreeze.py",
        (
            (
                "        loss = cross_entropy(model(images), labels)\n",
                mark("        loss = cross_entropy(network.head(model.module.features(images)), labels)"),
            ),
            ("        return self.body(images)\n", mark("        return self.body(images)")),
        ),
        words=("different gradients",),
        never=("wrap the model: model = DistributedDataParallel",),
    ),
    "loss with parameters of its own": Fault(
        GRADIENTS,
        "centers.py",
        (
            ("    loss_model = Wrapped(criterion)\n", "    loss_model = criterion\n"),
            ("    criterion = CenterLoss(10, 8)\n", mark("    criterion = CenterLoss(10, 8)")),
        ),
        words=("centers", "DistributedDataParallel"),
    ),
    "loss that no optimizer has": Fault(
        CHANGE,
        "centers.py",
        (
            ("            center_optimizer.step()\n", ""),
            ("            center_optimizer.zero_grad()\n", "            criterion.zero_grad()\n"),
            ("    center_optimizer = torch.optim.SGD(criterion.parameters(), lr=0.5)\n", ""),
            (', "second": center_optimizer', ""),
            ("    criterion = CenterLoss(10, 8)\n", mark("    criterion = CenterLoss(10, 8)")),
        ),
        words=("centers", "no optimizer has"),
    ),
    "initialized after wrapping": Fault(
        WEIGHTS,
        "trainer.py",
        (
            (
                "        self.model = DDP(network)\n",
                f"        self.model = DDP(network)  {MARK}\n"
                "        torch.manual_seed(SEED + self.rank)\n"
                "        nn.init.orthogonal_(network[0].weight)\n",
            ),
            ("        network = nn.Sequential", f"        # the next line  {MARK}\n        network = nn.Sequential"),
        ),
        words=("different 0.weight",),
        never=("wrap the model in DistributedDataParallel",),
    ),
    "copy of weights before the broadcast": Fault(
        WEIGHTS,
        "contrast.py",
        (
            ("torch.manual_seed(SEED)\n", "torch.manual_seed(SEED + rank)\n"),
            ("key_encoder = copy.deepcopy(encoder)", f"# the next line  {MARK}\nkey_encoder = copy.deepcopy(encoder)"),
        ),
        words=("different",),
    ),
    "buffers in the order of a set": Fault(
        PARAMETERS,
        "centers.py",
        (
            (
                "        self.centers = nn.Parameter(torch.randn(classes, width))\n",
                "        self.centers = nn.Parameter(torch.randn(classes, width))\n"
                '        for name in {"ages", "counts", "errors", "means", "spreads"}:\n'
                "            self.register_buffer(name, torch.zeros(classes))\n",
            ),
            ("    loss_model = Wrapped(criterion)\n", mark("    loss_model = Wrapped(criterion)")),
        ),
        words=("the same buffers in different orders", "sorted"),
        pods=2,
    ),
    "weights tied after the optimizer": Fault(
        CHANGE,
        "letters.py",
        (
            ("        self.head.weight = self.embedding.weight\n", ""),
            ("model = DistributedDataParallel(network)\n", ""),
            (
                "optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)\n",
                f"optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)  {MARK}\n"
                "network.head.weight = network.embedding.weight\n"
                "model = DistributedDataParallel(network)\n",
            ),
            ("            optimizer.step()\n", mark("            optimizer.step()")),
        ),
        words=("an optimizer has 1 parameter",),
        state=WARNING,
    ),
    "one network of two not wrapped": Fault(
        GRADIENTS,
        "gan.py",
        (
            (
                "generator = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64)))\n",
                mark("generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))"),
            ),
        ),
        words=("different gradients of", "DistributedDataParallel"),
    ),
    "biases left out of the average": Fault(
        GRADIENTS,
        "functional.py",
        (
            ("for value in weights.values()])\n", "for value in weights.values() if value.dim() > 1])\n"),
            ("        optimizer.step()\n", mark("        optimizer.step()")),
            ("skeleton = nn.Sequential", f"# the next line  {MARK}\nskeleton = nn.Sequential"),
        ),
        words=("parameter", "all_reduce"),
        never=("wraps",),
    ),
}

# -- optimization


_OPTIMIZATION: Final = {
    "plateau of the rank's own loss": Fault(
        GRADIENTS,
        "validated.py",
        (
            ("    dist.all_reduce(total)\n    return (total[0]", "    return (total[0]"),
            ("    if bad_epochs > 8:\n        break\n", ""),
            ("    plateau.step(loss)\n", mark("    plateau.step(loss + epoch * dist.get_rank())")),
        ),
        words=("learning rate differs between ranks", "all_reduce"),
    ),
    "schedule on rank 0 only": Fault(
        GRADIENTS,
        "trainer.py",
        (
            (
                "        self.scheduler.step()\n",
                f"        if self.rank == 0:\n            self.scheduler.step()  {MARK}\n",
            ),
        ),
        words=("learning rate differs between ranks",),
        never=("same metric",),
    ),
    "learning rate scaled by the rank": Fault(
        GRADIENTS,
        "trainer.py",
        (
            ("lr=settings.lr,", "lr=settings.lr * (1 + self.rank),"),
            ("        self.optimizer = torch", f"        # the next line  {MARK}\n        self.optimizer = torch"),
            ("        self.scheduler.step()\n", mark("        self.scheduler.step()")),
        ),
        words=("learning rate differs between ranks from step 1",),
        never=("same metric",),
    ),
    "clipping by the rank's own loss": Fault(
        GRADIENTS,
        "trainer.py",
        (
            ("self.settings.clip)\n", "self.settings.clip * loss.item() / 10)\n"),
            ("        self.optimizer.step()\n", mark("        self.optimizer.step()")),
        ),
        words=("changed between backward and step",),
        never=("wrap the model: model",),
    ),
    "noise on gradients by each rank": Fault(
        GRADIENTS,
        "letters.py",
        (
            (
                "            optimizer.step()\n",
                "            for value in network.parameters():\n"
                "                value.grad.add_(torch.randn_like(value), alpha=1e-3)\n"
                f"            optimizer.step()  {MARK}\n",
            ),
        ),
        words=("changed between backward and step",),
        never=("wrap the model: model", r"no_sync\(\) for"),
    ),
    "synchronized at the first of a group": Fault(
        GRADIENTS,
        "letters.py",
        (
            ("with nullcontext() if ends_group else", "with nullcontext() if number % GROUP == 0 else"),
            ("            (compute_loss", f"            # the next line  {MARK}\n            (compute_loss"),
        ),
        words=(r"no_sync\(\)", "last micro-batch"),
    ),
    "shorter group not synchronized": Fault(
        GRADIENTS,
        "letters.py",
        (
            ("with nullcontext() if ends_group else", "with nullcontext() if number % GROUP == GROUP - 1 else"),
            ("            (compute_loss", f"            # the next line  {MARK}\n            (compute_loss"),
        ),
        words=(r"no_sync\(\)", "last micro-batch"),
    ),
    "synchronization switched off": Fault(
        GRADIENTS,
        "trainer.py",
        (
            (
                "        self.model = DDP(network)\n",
                "        self.model = DDP(network)\n        self.model.require_backward_grad_sync = False\n",
            ),
            ("        loss.backward()\n", mark("        loss.backward()")),
        ),
        words=("has not shared them",),
        never=("wrap the model: model",),
    ),
    "one optimizer steps without gradients": Fault(
        CHANGE,
        "centers.py",
        (
            ("            loss.backward()\n", "            loss.backward()\n            criterion.zero_grad()\n"),
            ("            center_optimizer.step()\n", mark("            center_optimizer.step()")),
            ("    criterion = CenterLoss(10, 8)\n", mark("    criterion = CenterLoss(10, 8)")),
        ),
        words=("centers",),
    ),
    "logarithm of a probability of 0": Fault(
        FINITE,
        "normalized.py",
        (
            ("            error.backward()\n", mark("            error.backward()")),
            (
                "            error = (model(scaled).squeeze(1) - goals.float()).square().mean()\n",
                "            error = model(scaled).squeeze(1).sub(goals.float()).relu().log().mean()\n",
            ),
        ),
        words=("the loss is -?inf|the loss is nan|not finite",),
    ),
    "noise that all ranks share": Fault(
        RANDOM,
        "gan.py",
        (
            ("torch.manual_seed(1 + dist.get_rank())\n", ""),
            (
                "        cross_entropy(discriminator(images), real).backward()\n",
                mark("        cross_entropy(discriminator(images), real).backward()"),
            ),
            (
                "        generated = generator(torch.randn(32, 8))\n",
                mark("        generated = generator(torch.randn(32, 8))"),
            ),
        ),
        words=("all ranks draw the same random numbers",),
        state=WARNING,
    ),
    "dropout that all ranks share": Fault(
        RANDOM,
        "letters.py",
        (
            ("torch.manual_seed(SEED + 100 * (rank + 1))\n", ""),
            ("def compute_loss(model, letters, following):\n", mark("def compute_loss(model, letters, following):")),
        ),
        words=("all ranks draw the same random numbers",),
        state=WARNING,
    ),
    "masks that all ranks share": Fault(
        RANDOM,
        "augmented.py",
        (
            ("torch.manual_seed(SEED + 1 + rank)\n", "torch.manual_seed(SEED + 1)\n"),
            (
                "        cross_entropy(model(images), labels).backward()\n",
                mark("        cross_entropy(model(images), labels).backward()"),
            ),
        ),
        words=("all ranks draw the same random numbers",),
        state=WARNING,
    ),
}

# -- resume


_SAVE_OF_TRAINER: Final = (
    '            torch.save(snapshot, self.settings.folder / "new.pt")\n',
    mark('            torch.save(snapshot, self.settings.folder / "new.pt")'),
)
_SAVE_OF_REPLAY: Final = (
    '            torch.save(state, "agent.new")\n',
    mark('            torch.save(state, "agent.new")'),
)
_SAVE_OF_CONTRAST: Final = (
    '        torch.save(saved, "contrast.tmp")\n',
    mark('        torch.save(saved, "contrast.tmp")'),
)
_SAVE_OF_SHADOW: Final = (
    '            torch.save(state, "shadow.new")\n',
    mark('            torch.save(state, "shadow.new")'),
)
_SAVE_OF_FIT: Final = (
    '        torch.save(content, "fit.pth.new")\n',
    mark('        torch.save(content, "fit.pth.new")'),
)
_SAVE_OF_DRAWN: Final = (
    '            torch.save({**saved, "generators": generators, "step": step}, "drawn.new")\n',
    mark('            torch.save({**saved, "generators": generators, "step": step}, "drawn.new")'),
)
_SAVE_OF_AUGMENTED: Final = (
    '        torch.save(saved, "augmented.new")\n',
    mark('        torch.save(saved, "augmented.new")'),
)
_SAVE_OF_LETTERS: Final = (
    '        torch.save(saved, CHECKPOINT + ".part")\n',
    mark('        torch.save(saved, CHECKPOINT + ".part")'),
)
_RESUME: Final = {
    "names with a prefix, not strict": Fault(
        RESUME,
        "trainer.py",
        (
            ('"model": self.model.module.state_dict()', '"model": self.model.state_dict()'),
            (
                '        self.model.module.load_state_dict(snapshot["model"])\n',
                '        self.model.module.load_state_dict(snapshot["model"], strict=False)\n',
            ),
            _SAVE_OF_TRAINER,
        ),
        words=("the model has its initial weights", "strict=True"),
    ),
    "names filtered away": Fault(
        RESUME,
        "trainer.py",
        (
            (
                '        self.model.module.load_state_dict(snapshot["model"])\n',
                "        own = self.model.state_dict()\n"
                '        own |= {name: value for name, value in snapshot["model"].items() if name in own}\n'
                "        self.model.load_state_dict(own)\n",
            ),
            _SAVE_OF_TRAINER,
        ),
        words=("the model has its initial weights",),
    ),
    "loaded into a copy": Fault(
        RESUME,
        "trainer.py",
        (
            ("import os\n", "import copy\nimport os\n"),
            ("        self.model.module.load_state_dict(", "        copy.deepcopy(self.model.module).load_state_dict("),
            _SAVE_OF_TRAINER,
        ),
        words=("the model has its initial weights",),
    ),
    "epoch skipped": Fault(
        RESUME,
        "trainer.py",
        (
            (
                '        self.progress = Progress(**snapshot["progress"])\n',
                '        self.progress = Progress(**snapshot["progress"])\n        self.progress.epoch += 1\n',
            ),
            _SAVE_OF_TRAINER,
        ),
        words=("data|skips",),
        never=("generator", "starts again"),
    ),
    "optimizer rebuilt after its load": Fault(
        RESUME,
        "trainer.py",
        (
            (
                '        self.scheduler.load_state_dict(snapshot["scheduler"])\n',
                "        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.settings.lr)\n"
                "        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.compute_factor)\n"
                '        self.scheduler.load_state_dict(snapshot["scheduler"])\n',
            ),
            _SAVE_OF_TRAINER,
        ),
        words=("optimizer|learning rate",),
    ),
    "optimizer of the model before the load": Fault(
        RESUME,
        "trainer.py",
        (
            (
                '        self.model.module.load_state_dict(snapshot["model"])\n',
                "        network = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 10))\n"
                '        network.load_state_dict(snapshot["model"])\n'
                "        self.model = DDP(network)\n",
            ),
            _SAVE_OF_TRAINER,
        ),
        words=("optimizer", "no parameter|other parameters|not change|never change|has others|build the optimizer"),
        never=(r"save optimizer\.state_dict",),
    ),
    "steps of the warm-up not loaded": Fault(
        RESUME,
        "recipe.py",
        (
            ('        self.global_step = content["global_step"]\n', ""),
            (
                '            torch.save(content, self.config.path + ".part")\n',
                mark('            torch.save(content, self.config.path + ".part")'),
            ),
        ),
        words=("learning rate",),
        never=("scheduler",),
    ),
    "step number begins with 0": Fault(
        RESUME,
        "drawn.py",
        (('    step = saved["step"]\n', ""), _SAVE_OF_DRAWN),
        words=("learning rate",),
        never=("scheduler",),
    ),
    "generator not loaded": Fault(
        RESUME,
        "drawn.py",
        (('    generator.set_state(saved["generators"][rank])\n', ""), _SAVE_OF_DRAWN),
        words=("the data starts again with step 1",),
        never=("sampler", "epoch"),
    ),
    "generator of rank 0 for all": Fault(
        RESUME,
        "drawn.py",
        (('saved["generators"][rank]', 'saved["generators"][0]'), _SAVE_OF_DRAWN),
        words=("rank 1|another rank|rank 0", "generator|random"),
        never=("sampler", "epoch"),
    ),
    "replay buffer not loaded": Fault(
        RESUME,
        "replay.py",
        (
            ('        self.buffer.items = mine["buffer"]\n', ""),
            ('{"buffer": self.buffer.items, ', "{"),
            _SAVE_OF_REPLAY,
        ),
        words=("batch",),
        never=("sampler", "epoch", "augmentation"),
    ),
    "number of moves not saved": Fault(
        RESUME,
        "replay.py",
        (
            ('        mine["played"] = self.played\n', ""),
            ('        self.played = mine["played"]\n', ""),
            _SAVE_OF_REPLAY,
        ),
        words=("batch",),
        never=("sampler", "epoch", "augmentation"),
    ),
    "target network not loaded": Fault(
        RESUME,
        "replay.py",
        (('        self.target.load_state_dict(state["target"])\n', ""), _SAVE_OF_REPLAY),
        words=("not restored|not loaded|not saved", "Sequential|target"),
        never=("dropout",),
    ),
    "queue of keys not saved": Fault(
        RESUME,
        "contrast.py",
        (
            (", keys=queue.keys, position=queue.position)", ")"),
            ('    queue.keys = saved["keys"]\n    queue.position = saved["position"]\n', ""),
            _SAVE_OF_CONTRAST,
        ),
        words=("not restored|not loaded|not saved", "queue|keys"),
        never=("dropout",),
    ),
    "place in the queue not saved": Fault(
        RESUME,
        "contrast.py",
        (('    queue.position = saved["position"]\n', ""), _SAVE_OF_CONTRAST),
        words=("not restored|not loaded|not saved", "queue|position"),
        never=("dropout",),
    ),
    "slow encoder not loaded": Fault(
        RESUME,
        "contrast.py",
        (
            (
                '    key_encoder.load_state_dict(saved["key_encoder"])\n',
                "    key_encoder.load_state_dict(encoder.state_dict())\n",
            ),
            _SAVE_OF_CONTRAST,
        ),
        words=("not restored|not loaded|not saved",),
        never=("dropout",),
    ),
    "scale of inputs not saved": Fault(
        RESUME,
        "normalized.py",
        (
            ('        content |= {"count": scale.count, "total": scale.total, "squares": scale.squares}\n', ""),
            (
                '    scale.count = content["count"]\n    scale.total = content["total"]\n'
                '    scale.squares = content["squares"]\n',
                "",
            ),
            _SAVE_OF_FIT,
        ),
        words=("batch|scale", "not restored|not loaded|not saved|differ"),
        never=("augmentation",),
    ),
    "count of the scale not loaded": Fault(
        RESUME,
        "normalized.py",
        (('    scale.count = content["count"]\n', ""), _SAVE_OF_FIT),
        words=("batch|scale", "not restored|not loaded|not saved|differ"),
        never=("augmentation",),
    ),
    "average of the weights not loaded": Fault(
        RESUME,
        "shadow.py",
        (
            ('            shadow.values = state["average"]\n', "            shadow = Shadow(network)\n"),
            _SAVE_OF_SHADOW,
        ),
        words=("shadow|average", "not loaded|not restored|not saved"),
    ),
    "updates of the average not counted on": Fault(
        RESUME,
        "shadow.py",
        (
            ('            shadow.updates = state["updates"]\n', ""),
            ('            state["updates"] = shadow.updates\n', ""),
            _SAVE_OF_SHADOW,
        ),
        words=("shadow|average|counter", "not loaded|not restored|not saved"),
    ),
    "average of SWA not loaded": Fault(
        RESUME,
        "swa.py",
        (("network=network, average=average, ", "network=network, "),),
        words=("AveragedModel", "not restored"),
        helper="torch.save(",
    ),
    "position in the shards not loaded": Fault(
        RESUME,
        "shards.py",
        (
            ("    save(epoch + 1, 0)\n", ""),
            ("        position = json.load(file)\n", '        position["epoch"] = json.load(file)["epoch"]\n'),
            ("f\"weights-{position['epoch']}-{position['batches']}.pt\"", '"last.pt"'),
            ("f\"optimizer-{position['epoch']}-{position['batches']}.pt\"", '"last-optimizer.pt"'),
            ('f"weights-{epoch}-{batches}.pt")', mark('"last.pt")').rstrip()),
            ('f"optimizer-{epoch}-{batches}.pt")', mark('"last-optimizer.pt")').rstrip()),
        ),
        words=("starts again",),
        never=("sampler",),
    ),
    "scaler not saved": Fault(
        RESUME,
        "amp.py",
        (
            (", scaler=scaler)", ")"),
            ("init_scale=1024.0, growth_interval=5", "init_scale=1024.0, growth_interval=2"),
        ),
        words=("scaler|GradScaler",),
        never=("dropout",),
        helper="torch.save(",
    ),
    "one optimizer of two not saved": Fault(
        RESUME,
        "centers.py",
        (
            (', "second": center_optimizer', ""),
            ("lr=0.5)", "lr=0.5, momentum=0.9)"),
            (
                '            torch.save({**content, "epoch": epoch + 1}, "centers.new")\n',
                mark('            torch.save({**content, "epoch": epoch + 1}, "centers.new")'),
            ),
        ),
        words=("optimizer's state",),
    ),
    "random state of NumPy not loaded": Fault(
        RESUME,
        "augmented.py",
        (('    np.random.set_state(saved["numpy"][rank])\n', ""), _SAVE_OF_AUGMENTED),
        words=("augmentation", "numpy"),
    ),
    "random state of masks not loaded": Fault(
        RESUME,
        "augmented.py",
        (('    torch.set_rng_state(saved["torch"][rank])\n', ""), _SAVE_OF_AUGMENTED),
        words=("random state",),
    ),
    "seeded again at each start": Fault(
        RESUME,
        "letters.py",
        (('    torch.set_rng_state(saved["random"][rank])\n', ""), _SAVE_OF_LETTERS),
        words=("random state|random numbers",),
    ),
    "saved in half precision": Fault(
        RESUME,
        "letters.py",
        (
            (
                '{"network": network.state_dict(), ',
                '{"network": {name: value.half() for name, value in network.state_dict().items()}, ',
            ),
            _SAVE_OF_LETTERS,
        ),
        words=("weights of no step before", "full precision"),
    ),
    "head not loaded": Fault(
        RESUME,
        "unfreeze.py",
        (
            (
                '    network.load_state_dict(state["network"])\n',
                '    body = {name: value for name, value in state["network"].items() if name.startswith("body")}\n'
                "    network.load_state_dict(body, strict=False)\n",
            ),
            ('        torch.save({"network"', f'        # the next line  {MARK}\n        torch.save({{"network"'),
        ),
        words=("of no step before .*head.weight|has its initial weights",),
    ),
    "saved before the step": Fault(
        RESUME,
        "drawn.py",
        (
            ("    optimizer.step()\n    step += 1\n", "    step += 1\n"),
            (
                '            os.replace("drawn.new", "drawn.pt")\n',
                '            os.replace("drawn.new", "drawn.pt")\n    optimizer.step()\n',
            ),
            _SAVE_OF_DRAWN,
        ),
        words=("step",),
        never=("sampler", "epoch"),
    ),
    "parameters without buffers": Fault(
        RESUME,
        "cnn.py",
        (("checkpoints = Checkpoints(model=network,", "checkpoints = Checkpoints(model=network[4], frozen=frozen,"),),
        words=("weights of no step before|buffers are not saved",),
        helper="torch.save(",
    ),
    "loaded on rank 0 after wrapping": Fault(
        RESUME,
        "contrast.py",
        (
            (
                '    encoder.load_state_dict(saved["encoder"])\n',
                '    if rank == 0:\n        encoder.load_state_dict(saved["encoder"])\n',
            ),
            ('    saved = torch.load("contrast.pt")\n', mark('    saved = torch.load("contrast.pt")')),
        ),
        words=("not loaded on all ranks",),
    ),
}

# -- saves and endings


_ENDING: Final = {
    "best weights in a list of references": Fault(
        SAVED,
        "validated.py",
        (
            ("copy.deepcopy(network.state_dict())", "network.state_dict()"),
            ('        best = {"loss"', f'        # the next line  {MARK}\n        best = {{"loss"'),
            ('    if loss < best["loss"]:\n', "    if epoch == 0:\n"),
        ),
        words=("returns references", "deepcopy"),
    ),
    "best weights in a shallow copy": Fault(
        SAVED,
        "validated.py",
        (
            ("copy.deepcopy(network.state_dict())", "network.state_dict().copy()"),
            ('        best = {"loss"', f'        # the next line  {MARK}\n        best = {{"loss"'),
            ('    if loss < best["loss"]:\n', "    if epoch == 0:\n"),
        ),
        words=("references", "deepcopy|clone"),
    ),
    "best weights in a new dictionary": Fault(
        SAVED,
        "validated.py",
        (
            (
                "copy.deepcopy(network.state_dict())",
                "{name: value.cpu() for name, value in network.state_dict().items()}",
            ),
            ('        best = {"loss"', f'        # the next line  {MARK}\n        best = {{"loss"'),
            ('    if loss < best["loss"]:\n', "    if epoch == 0:\n"),
        ),
        words=("references", "deepcopy|clone"),
    ),
    "stopped early on one rank": Fault(
        STEPS,
        "validated.py",
        (
            ("    if bad_epochs > 8:\n        break\n", "    if epoch == 1 and rank == 1:\n        break\n"),
            ("        optimizer.step()\n", mark("        optimizer.step()")),
        ),
        words=("rank 1 left the loop",),
    ),
    "metric shared by rank 0 only": Fault(
        STEPS,
        "validated.py",
        (
            ("    dist.all_reduce(total)\n", f"    if rank == 0:\n        dist.all_reduce(total)  {MARK}\n"),
            ("        optimizer.step()\n", mark("        optimizer.step()")),
        ),
        words=("wait|stopped|collective",),
    ),
    "barrier within the save of rank 0": Fault(
        STEPS,
        "trainer.py",
        (
            (
                '            os.replace(self.settings.folder / "new.pt", self.settings.folder / "last.pt")\n',
                '            os.replace(self.settings.folder / "new.pt", self.settings.folder / "last.pt")\n'
                f"            dist.barrier()  {MARK}\n",
            ),
            ("        self.optimizer.step()\n", mark("        self.optimizer.step()")),
        ),
        words=("wait|stopped|collective",),
    ),
    "batch skipped on one rank": Fault(
        STEPS,
        "trainer.py",
        (
            (
                "                loss = self.train_batch(images, labels)\n",
                "                if self.rank == 1 and self.progress.step == 3:\n"
                "                    self.progress.step += 1\n"
                "                    continue\n"
                "                loss = self.train_batch(images, labels)\n",
            ),
            (
                "            for images, labels in self.loader:\n",
                mark("            for images, labels in self.loader:"),
            ),
        ),
        words=("steps",),
    ),
    "stream that ends earlier on a rank": Fault(
        STEPS,
        "stream.py",
        (
            (
                "for index in order[self.rank :: self.world_size][self.first_sample :]:",
                "for index in order[self.rank :: self.world_size][self.first_sample : 160 - 64 * self.rank]:",
            ),
            (
                "    for batch, (images, labels) in enumerate(loader, first_batch):\n",
                mark("    for batch, (images, labels) in enumerate(loader, first_batch):"),
            ),
        ),
        words=("wait|stopped|steps",),
    ),
    "every rank saves its average": Fault(
        WRITER,
        "shadow.py",
        (
            ("    is_first = dist.get_rank() == 0\n", "    is_first = True\n"),
            ('            torch.save(state, "shadow.new")\n', mark('            torch.save(state, "shadow.pt")')),
            ('            os.replace("shadow.new", "shadow.pt")\n', ""),
        ),
        words=("both write shadow.pt",),
    ),
}

PLANTED: Final = MappingProxyType(_DATA | _MODEL | _OPTIMIZATION | _RESUME | _ENDING)
"""By name: what people do."""

OPEN: Final = MappingProxyType(
    {"metric shared by rank 0 only": "gloo ends the ranks before the collectives can be compared"}
)
"""Faults of which the report is not right yet, and why: a wrong or missing reason, or no failure."""
