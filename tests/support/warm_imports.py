"""Imports of the server from which warm processes are forked: all modules that start no thread."""

import gc
import sys

gc.disable()
# As in the operator: Kopf imports them only if they are installed.
UNUSED = ("kubernetes", "kubernetes_asyncio", "pykube")
for name in UNUSED:
    sys.modules[name] = None  # type: ignore[assignment]

import kopf  # noqa: E402, F401
import prometheus_client  # noqa: E402, F401
import torch._dynamo  # noqa: E402
import torch.distributed.run  # noqa: E402, F401

import ddp_trainer.trainer  # noqa: E402, F401
import tests.support.warm_launcher  # noqa: E402, F401

for name in UNUSED:
    del sys.modules[name]
# A garbage collection in a forked process would write to all these objects, and so copy their memory.
gc.freeze()
gc.enable()
