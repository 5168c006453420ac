"""Failures of other people's training code, each with the answer that a user must get, written before the first run.

Two ranks train; ``step`` runs in each step, ``setup`` before the process group exists, ``after`` after the last step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MARK: Final = "# here"
"""Ends the line that the answer must name."""
STEPS: Final = 12
_SCRIPT: Final = """import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
here = os.environ["RANK"]
{setup}
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
{step}
    loss = model(torch.randn(16, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {{step}} loss {{loss.item():.4f}}", flush=True)
    time.sleep(0.02)
{after}
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Planted:
    """A failure. ``cause``, ``remedy`` and ``never``: regular expressions of the message and the remedy.

    ``ranks``: those that may be named; ``restarts``: the most that are useful, because another attempt may succeed;
    ``pods``: which the two ranks share.
    """

    cause: tuple[str, ...]
    remedy: str
    category: str = "UserError"
    ranks: tuple[int | None, ...] = (1,)
    restarts: int = 0
    pods: int = 1
    never: str = "$^"
    setup: str = ""
    step: str = ""
    after: str = ""
    command: tuple[str, ...] = ("python", "train.py")
    files: tuple[tuple[str, str], ...] = ()
    env: tuple[tuple[str, str], ...] = ()

    def write(self) -> str:
        """Return the script."""
        step = "\n".join(f"    {line}" for line in (self.step or "pass").splitlines())
        return _SCRIPT.format(setup=self.setup, step=step, after=self.after, steps=STEPS)

    @property
    def line(self) -> int | None:
        """The line of the script that the answer must name; None: no line of it."""
        lines = self.write().splitlines()
        return next((number for number, line in enumerate(lines, 1) if line.endswith(MARK)), None)


BOTH: Final = (0, 1)
LFS_POINTER: Final = f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * '4'}\nsize 12345\n"

PLANTED: Final = {
    "a pipeline whose stages use different tags": Planted(
        cause=("mismatch", "in recv", "in send"),
        remedy="send needs a recv .* same tag",
        ranks=(0,),
        pods=2,
        step="""\
if step == 3:
    time.sleep(1)
part = torch.zeros(4)
if rank == 0:
    dist.send(part, dst=1, tag=step)
    dist.recv(part, src=1, tag=100 + step)  # here
else:
    dist.recv(part, src=0, tag=step)
    dist.send(part, dst=0, tag=100 + step + (step > 3))""",
    ),
    "a retry without a limit": Planted(
        cause=("rank 1 is in read", "tries .return load"),
        remedy="see in the log why each try fails",
        category="Hang",
        restarts=1,
        setup="""\
def load(path):
    with open(path) as file:
        return file.read()
def read(path):
    while True:
        try:
            return load(path)
        except OSError:
            time.sleep(0.2)  # here""",
        step="if rank == 1 and step == 3: read('none.txt')",
    ),
    "a text in a column of numbers": Planted(
        cause=("ValueError", "17,25"),
        remedy="is no number .it has a decimal comma",
        step="""\
row = {"price": "17,25" if rank == 1 and step == 3 else "17"}
float(row["price"])  # here""",
    ),
    "an argument --local_rank that the script requires": Planted(
        cause=("required: --local_rank",),
        remedy="read LOCAL_RANK",
        ranks=BOTH,
        setup="""\
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, required=True)
parser.parse_args()  # here""",
    ),
    "a crash in native code that the script calls": Planted(
        cause=("SIGSEGV", "in native code, called by"),
        remedy="check what the line that crashed passes on .*string_at",
        category="Unknown",
        restarts=1,
        step="""\
if rank == 1 and step == 3:
    import ctypes
    ctypes.string_at(8)  # here""",
    ),
    "a launch script with an unset variable": Planted(
        cause=("DATA_ROOT",),
        remedy="(?i)variable|DATA_ROOT|env",
        ranks=BOTH,
        command=("bash", "run.sh"),
        files=(("run.sh", "set -eu\nexec python train.py --data $DATA_ROOT\n"),),
    ),
    "an exception in a pool of processes": Planted(
        cause=("ValueError", "bad record 17"),
        remedy="line of the script",
        setup="""\
def parse(number):
    if number == 17:
        raise ValueError('bad record 17')  # here
    return number""",
        step="""\
if rank == 1 and step == 3:
    import multiprocessing
    with multiprocessing.get_context('fork').Pool(2) as pool:
        pool.map(parse, range(20))""",
    ),
    "a child program that fails": Planted(
        cause=("CalledProcessError", "status 3"),
        remedy="own output",
        restarts=1,
        step="""\
if rank == 1 and step == 3:
    import subprocess
    subprocess.run([sys.executable, '-c', 'raise SystemExit(3)'], check=True)  # here""",
    ),
    "a timer of the script whose handler raises": Planted(
        cause=("StepTimeout", "longer than 1 s"),
        remedy="line of the script",
        restarts=1,
        setup="""\
import signal
class StepTimeout(Exception): pass
def end(*_): raise StepTimeout('step longer than 1 s')
signal.signal(signal.SIGALRM, end)""",
        step="""\
if rank == 1 and step == 3:
    signal.setitimer(signal.ITIMER_REAL, 1)
    time.sleep(30)  # here""",
    ),
    "a thread that ends the process": Planted(
        cause=("exited with code 5", "queue is broken"),
        remedy="(?i)last lines|ended itself",
        category="Unknown",
        restarts=1,
        step="""\
if rank == 1 and step == 3:
    import threading
    print('queue is broken, leaving', flush=True)
    threading.Thread(target=os._exit, args=(5,)).start()
    time.sleep(5)""",
    ),
    "an exception in a coroutine": Planted(
        cause=("KeyError", "user_id"),
        remedy="line of the script",
        setup="""\
async def fetch(record):
    return record['user_id']  # here""",
        step="""\
if rank == 1 and step == 3:
    import asyncio
    async def fetch_all(): await asyncio.gather(fetch({'user_id': 1}), fetch({}))
    asyncio.run(fetch_all())""",
    ),
    "a coroutine that is awaited for too long": Planted(
        cause=("TimeoutError",),
        remedy="(?i)service|retry|limit|time",
        restarts=1,
        step="""\
if rank == 1 and step == 3:
    import asyncio
    async def ask(): await asyncio.wait_for(asyncio.sleep(60), 0.5)
    asyncio.run(ask())  # here""",
    ),
    "a coroutine that awaits what nobody puts": Planted(
        cause=("rank 1", "consume", "get"),
        remedy="(?i)line|limit",
        category="Hang",
        restarts=1,
        setup="""\
import asyncio
async def consume(queue):
    return await queue.get()  # here
async def run():
    queue = asyncio.Queue()
    await asyncio.gather(asyncio.sleep(0), consume(queue))""",
        step="if rank == 1 and step == 5: asyncio.run(run())",
    ),
    "a database that another process has locked": Planted(
        cause=("database is locked",),
        remedy="(?i)lock",
        restarts=1,
        step="""\
if rank == 1 and step == 3:
    import sqlite3
    first = sqlite3.connect('meta.db', isolation_level=None)
    first.execute('begin exclusive')
    sqlite3.connect('meta.db', timeout=0.1).execute('create table t (x)')  # here""",
    ),
    "a table that does not exist": Planted(
        cause=("no such table: samples",),
        remedy="line of the script",
        step="""\
if rank == 1 and step == 3:
    import sqlite3
    sqlite3.connect(':memory:').execute('select * from samples')  # here""",
    ),
    "a mapped file that is too short": Planted(
        cause=("mmap length is greater than file size",),
        remedy="(?i)file|shape|line of the script",
        step="""\
if rank == 1 and step == 3:
    import numpy
    numpy.memmap('tokens.bin', dtype='int32', mode='r', shape=(1000,))  # here""",
        files=(
            (
                "tokens.bin",
                "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
            ),
        ),
    ),
    "a truncated image": Planted(
        cause=("(?i)truncated",),
        remedy="(?i)incomplete|damaged|truncated",
        restarts=1,
        step="""\
if rank == 1 and step == 3:
    from PIL import Image
    Image.new('RGB', (64, 64), 'red').save('a.png')
    data = open('a.png', 'rb').read()
    open('a.png', 'wb').write(data[:60])
    Image.open('a.png').load()  # here""",
    ),
    "a collate function that a spawned worker cannot receive": Planted(
        cause=("(?i)pickle", "lambda"),
        remedy="(?i)pickled",
        ranks=BOTH,
        setup="""\
def open_loader():
    spawn = {'num_workers': 1, 'multiprocessing_context': 'spawn'}
    loader = torch.utils.data.DataLoader(range(9), collate_fn=lambda x: x, **spawn)
    return iter(loader)  # here
open_loader()""",
    ),
    "a parameter that is changed in place": Planted(
        cause=("leaf Variable that requires grad",),
        remedy="(?i)no_grad|clone|in place",
        ranks=BOTH,
        step="""\
if step == 3:
    model.module.weight.mul_(0.9)  # here""",
    ),
    "a batch of one sample": Planted(
        cause=("Expected more than 1 value per channel",),
        remedy="(?i)drop_last|batch",
        step="""\
if rank == 1 and step == 3:
    nn.BatchNorm1d(4)(torch.randn(1, 4))  # here""",
    ),
    "an assertion about the loss": Planted(
        cause=("AssertionError",),
        remedy="(?i)diverge|learning rate",
        restarts=1,
        step="""\
if rank == 1 and step == 3:
    value = torch.tensor(float('nan'))
    assert not torch.isnan(value).any()  # here""",
    ),
    "a gradient scaler that unscales twice": Planted(
        cause=("unscale_.. has already been called",),
        remedy="`scaler.unscale_\\(optimizer\\)` requires",
        ranks=BOTH,
        setup="scaler = torch.amp.GradScaler('cpu')",
        step="""\
if step == 3:
    scaler.scale(model(torch.randn(4, 8)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)  # here""",
    ),
    "a batch that the ranks cannot share": Planted(
        cause=("batch size 7 must be divisible by the world size",),
        remedy="(?i)nodes|procs|number of ranks",
        ranks=BOTH,
        step="""\
if step == 0:
    assert 7 % dist.get_world_size() == 0, 'batch size 7 must be divisible by the world size'  # here""",
    ),
    "a rank with less data": Planted(
        cause=("rank 1", "(?i)ended"),
        remedy="(?i)unequal length|same number|leave the loop",
        step="""\
if rank == 1 and step == 5:
    break""",
    ),
    "a barrier on one rank": Planted(
        cause=("rank 0", "rank 1", "barrier"),
        remedy="same collectives",
        ranks=BOTH,
        step="""\
if rank == 0 and step == 3:
    dist.barrier()  # here""",
    ),
    "an object that cannot be broadcast": Planted(
        cause=("cannot pickle", "lock"),
        remedy="(?i)pickle|line of the script",
        ranks=(0,),
        step="""\
if step == 3:
    import threading
    dist.broadcast_object_list([threading.Lock() if rank == 0 else None], src=0)  # here""",
    ),
    "too many open files": Planted(
        cause=("Too many open files",),
        remedy="ulimit -n",
        restarts=1,
        step="""\
if rank == 1 and step == 3:
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
    files = [open('/dev/null') for _ in range(200)]  # here""",
    ),
    "an array beyond the memory": Planted(
        cause=("(?i)unable to allocate",),
        remedy="(?i)memory",
        category="OOM",
        restarts=1,
        step="""\
if rank == 1 and step == 3:
    import numpy
    numpy.ones(10**14)  # here""",
    ),
    "a write to a full device": Planted(
        cause=("No space left",),
        remedy="(?i)full",
        restarts=1,
        step="""\
if rank == 1 and step == 3:
    with open('/dev/full', 'w') as file: file.write('x' * 100000)  # here""",
    ),
    "a folder instead of a file": Planted(
        cause=("Is a directory",),
        remedy="(?i)folder|path|line of the script",
        ranks=(0,),
        step="""\
if rank == 0 and step == 3:
    torch.save(model.state_dict(), open('/usr', 'wb'))  # here""",
    ),
    "a wrong type of an argument": Planted(
        cause=("invalid int value: 'ten'",),
        remedy="(?i)argument",
        ranks=BOTH,
        setup="""\
import argparse
parser = argparse.ArgumentParser()
parser.add_argument('--epochs', type=int)
parser.parse_args()  # here""",
        command=("python", "train.py", "--epochs", "ten"),
    ),
    "an unknown option of a configuration": Planted(
        cause=("unexpected keyword argument 'lrate'",),
        remedy="line of the script",
        ranks=BOTH,
        setup="""\
import dataclasses
@dataclasses.dataclass
class Config:
    lr: float = 0.1
Config(**{'lrate': 0.2})  # here""",
    ),
    "a queue that nobody empties": Planted(
        cause=("rank 1", "put"),
        remedy="(?i)lock|thread|leave its line",
        category="Hang",
        restarts=1,
        step="""\
if rank == 1 and step == 3:
    import queue
    buffer = queue.Queue(maxsize=1)
    buffer.put(1)
    buffer.put(2)  # here""",
    ),
    "threads that lock each other": Planted(
        cause=("rank 0", "join"),
        remedy="(?i)lock|thread|leave its line",
        category="Hang",
        ranks=(0,),
        restarts=1,
        setup="""\
import threading
a, b = threading.Lock(), threading.Lock()
def work(first, second):
    with first:
        time.sleep(0.3)
        with second: pass""",
        step="""\
if rank == 0 and step == 3:
    pairs = (a, b), (b, a)
    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in pairs]
    for thread in threads: thread.start()
    for thread in threads: thread.join()  # here""",
    ),
    "a recursion without a limit": Planted(
        cause=("SIGSEGV|RecursionError", "(?i)recurs|descend"),
        remedy="(?i)recurs|stack",
        category="Unknown",
        restarts=1,
        step="""\
if rank == 1 and step == 3:
    import json
    sys.setrecursionlimit(10**8)
    class Deep:
        def __repr__(self): return repr(self)  # here
    repr(Deep())""",
    ),
    "memory that is freed twice": Planted(
        cause=("SIGABRT|SIGSEGV",),
        remedy="(?i)native",
        category="Unknown",
        restarts=1,
        step="""\
if rank == 1 and step == 3:
    import ctypes
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    address = ctypes.c_void_p(libc.malloc(5000))
    libc.free(address)
    libc.free(address)  # here""",
    ),
    "an abort in native code": Planted(
        cause=("SIGABRT",),
        remedy="(?i)native",
        category="Unknown",
        restarts=1,
        step="""\
if rank == 1 and step == 3:
    import ctypes
    ctypes.CDLL(None).abort()  # here""",
    ),
    "a host that does not exist": Planted(
        cause=("(?i)name or service not known|name resolution|nodename|No address",),
        remedy="(?i)address|service",
        restarts=1,
        never="(?i)other pods",
        step="""\
if rank == 1 and step == 3:
    import urllib.request
    urllib.request.urlopen('http://features.invalid/')  # here""",
    ),
    "a service without the object": Planted(
        cause=("404",),
        remedy="(?i)no object|address|revision",
        restarts=1,
        step="""\
if rank == 1 and step == 3:
    import http.server, threading, urllib.request
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self): self.send_error(404)
        def log_message(self, *args): pass
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/labels.json").read()  # here""",
    ),
    "TLS to a service without it": Planted(
        cause=("(?i)ssl|wrong.version",),
        remedy="(?i)certificate|address|service|https",
        restarts=1,
        never="(?i)other pods",
        step="""\
if rank == 1 and step == 3:
    import http.server, threading, urllib.request
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self): self.send_error(200)
        def log_message(self, *args): pass
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    urllib.request.urlopen(f"https://127.0.0.1:{server.server_port}/labels.json").read()  # here""",
    ),
    "a configuration that is no YAML": Planted(
        cause=("ScannerError|ParserError", "config.yaml"),
        remedy="(?i)yaml",
        ranks=BOTH,
        setup="""\
import yaml
with open('config.yaml') as file:
    config = yaml.safe_load(file)  # here""",
        files=(("config.yaml", "lr: 0.1\n  wd: [1\n"),),
    ),
    "a data set that does not exist": Planted(
        cause=("No such file or directory", "/data/imagenet/train.idx"),
        remedy="(?i)path|mount",
        ranks=BOTH,
        setup="open('/data/imagenet/train.idx')  # here",
    ),
    "a view of another size": Planted(
        cause=("is invalid for input of size",),
        remedy="(?i)shape|size|line of the script",
        ranks=BOTH,
        step="""\
if step == 3:
    torch.randn(4, 4).view(-1, 3)  # here""",
    ),
    "an iterator that is at its end": Planted(
        cause=("StopIteration",),
        remedy="line of the script|data",
        setup="batches = iter([1, 2, 3, 4] if here == '1' else range(99))",
        step="next(batches)  # here",
    ),
    "gathered tensors of different lengths": Planted(
        cause=("(?i)mismatch|size|length|shape",),
        remedy="(?i)same (collectives|shape)|shape",
        ranks=(None, 0, 1),
        step="""\
if step == 3:
    own = torch.ones(4 + 4 * rank)
    dist.all_reduce(own)  # here""",
    ),
    "a record that a worker cannot read": Planted(
        cause=("KeyError", "label"),
        remedy="line of the script",
        setup="""\
class Data(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, index):
        record = {'x': 1.0} if index == 20 and here == '1' else {'label': 2}
        return record['label']  # here
batches = iter(torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=1))""",
        step="next(batches)",
    ),
    "samples of different sizes in a batch": Planted(
        cause=("equal size|resize storage",),
        remedy="(?i)shape|collate|pad",
        setup="""\
class Data(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, index): return torch.zeros(9 if index == 20 and here == '1' else 8)
batches = iter(torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=1))""",
        step="next(batches)  # here",
    ),
    "a mapped file that a child shortens": Planted(
        cause=(
            "SIGBUS",
            "planted-tokens",
            "only 4096 bytes",
        ),
        remedy="(?i)shortened|rewritten",
        category="Unknown",
        restarts=1,
        setup="""\
import mmap, subprocess
open('planted-tokens' + here, 'wb').write(bytes(1 << 20))
file = open('planted-tokens' + here, 'rb')
tokens = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)""",
        step="""\
if rank == 1 and step == 5:
    subprocess.run(['truncate', '-s', '4096', 'planted-tokens1'], check=True)
x = sum(tokens[step * 8192:step * 8192 + 10])  # here""",
    ),
    "a mapped tensor whose file is shortened, read in a thread": Planted(
        cause=(
            "SIGBUS",
            "weights.bin",
            "only 4096 bytes",
        ),
        remedy="(?i)shortened|rewritten",
        category="Unknown",
        restarts=1,
        setup="""\
import concurrent.futures
open('weights.bin' + here, 'wb').write(bytes(1 << 20))
table = torch.from_file('weights.bin' + here, shared=True, size=1 << 18)
pool = concurrent.futures.ThreadPoolExecutor(2)
def read(step):
    return table[step * 4096:step * 4096 + 16].sum().item()  # here""",
        step="""\
if rank == 1 and step == 5: os.truncate('weights.bin1', 4096)
pool.submit(read, step).result()""",
    ),
    "a mapped file that is shortened, read by a DataLoader worker": Planted(
        cause=(
            "(?i)SIGBUS|Bus error",
            "tokens.bin1",
            "only 4096 bytes",
        ),
        remedy="(?i)shortened|rewritten",
        restarts=1,
        never="/dev/shm is full",
        setup="""\
import numpy
numpy.arange(1 << 18, dtype='float32').tofile('tokens.bin' + here)
class Data(torch.utils.data.Dataset):
    def __init__(self): self.tokens = numpy.memmap('tokens.bin' + here, dtype='float32', mode='r')
    def __len__(self): return 40
    def __getitem__(self, index):
        if here == '1' and index == 20: os.truncate('tokens.bin1', 4096)
        return torch.from_numpy(numpy.array(self.tokens[index * 5000:index * 5000 + 8]))
batches = iter(torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1))""",
        step="next(batches)",
    ),
    "objects that one rank gathers": Planted(
        cause=(
            "rank 0",
            "rank 1",
            "all_?gather",
            "all_?reduce",
        ),
        remedy="same collectives",
        ranks=BOTH,
        pods=2,
        step="""\
if rank == 0 and step == 4:
    dist.all_gather_object([None, None], {'acc': 1})  # here""",
    ),
    "a group that one rank creates": Planted(
        cause=(
            "rank 0",
            "rank 1",
            "new_group",
            "all_?reduce",
        ),
        remedy="same collectives",
        ranks=BOTH,
        step="""\
if rank == 0 and step == 4:
    dist.new_group([0, 1])  # here""",
    ),
    "a metric that a hook gathers on one rank": Planted(
        cause=(
            "rank 0",
            "rank 1",
            "all_?gather",
            "barrier",
        ),
        remedy="same collectives",
        ranks=BOTH,
        pods=2,
        setup="""\
def gather(module, args, output):
    if here == '0' and not module.training:
        dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.ones(1))  # here""",
        step="""\
if step == 0: model.module.register_forward_hook(gather)
if step == 4:
    if rank == 0:
        model.eval()
        with torch.no_grad(): model.module(torch.randn(2, 8))
        model.train()
    dist.barrier()""",
    ),
    "a callback that ends one rank with 0": Planted(
        cause=(
            "rank 1",
            "exit code 0",
            "plateau",
        ),
        remedy="(?i)leave the loop|another exit code",
        pods=2,
        setup="""\
class EarlyStopping:
    def on_train_batch_end(self, rank, step):
        if rank == 1 and step == 5:
            print('EarlyStopping: val_loss reached a plateau', flush=True)
            sys.exit(0)
callback = EarlyStopping()""",
        step="callback.on_train_batch_end(rank, step)",
    ),
    "a rank that leaves its group, and ends with 0 some seconds later": Planted(
        cause=(
            "rank 1",
            "exit code 0",
            "patience",
        ),
        remedy="(?i)leave the loop|another exit code",
        pods=2,
        step="""\
if rank == 1 and step == 5:
    print('no better loss: patience is over', flush=True)
    del loss, model, optimizer
    dist.destroy_process_group()
    gc.collect()
    time.sleep(3)
    sys.exit(0)""",
        setup="import gc",
    ),
    "a thread that ends one rank with 0": Planted(
        cause=(
            "rank 1",
            "exit code 0",
            "license",
        ),
        remedy="(?i)leave the loop|another exit code",
        step="""\
if step == 5:
    if rank == 1:
        import threading
        print('license server: seat returned', flush=True)
        threading.Thread(target=os._exit, args=(0,)).start()
        time.sleep(30)
    dist.barrier()""",
    ),
    "a line of 300 kB from a DataLoader worker": Planted(
        cause=(
            "ValueError",
            "cannot parse record 20",
            "(?s)\\A.{0,3000}\\Z",
        ),
        remedy="line of the script",
        setup="""\
class Data(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, index):
        if index == 20 and here == '1': raise ValueError('cannot parse record 20: ' + '{"a": 1}, ' * 30000)  # here
        return 1.0
batches = iter(torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=1))""",
        step="next(batches)",
    ),
    "a group of 200 exceptions": Planted(
        cause=("shard 0: 3 of 4 columns",),
        remedy="line of the script",
        step="""\
if rank == 1 and step == 3:
    errors = [ValueError(f'shard {n}: 3 of 4 columns' + ' x' * 500) for n in range(200)]
    raise ExceptionGroup('200 shards are invalid', errors)  # here""",
    ),
    "progress bars before the exception": Planted(
        cause=(
            "ValueError",
            "label 12 of image 7",
        ),
        remedy="line of the script",
        never="it/s",
        step="""\
for n in range(300):
    sys.stderr.write(f'\\rEpoch 0:  {n % 100}%|{"#" * 40}| {n}/300 [00:01<00:09, 31.2it/s, loss=0.{n}, v_num=3]')
if rank == 1 and step == 3:
    raise ValueError('label 12 of image 7 is beyond 10 classes\\r\\x1b[K\\x1b[1A')  # here""",
    ),
    "a regular expression that backtracks": Planted(
        cause=(
            "rank 1",
            "train.py",
        ),
        remedy="(?i)leave its line",
        category="Hang",
        restarts=1,
        setup="""\
import datetime, functools
dist.init_process_group = functools.partial(dist.init_process_group, timeout=datetime.timedelta(seconds=25))""",
        step="""\
if rank == 1 and step == 5:
    import re
    re.match(r'(a+)+$', 'a' * 60 + 'b')  # here""",
    ),
    "an endless loop in a DataLoader worker": Planted(
        cause=(
            "rank 1",
            "DataLoader worker",
            "skip_short",
        ),
        remedy="(?i)leave its line|worker",
        category="Hang",
        restarts=1,
        setup="""\
import datetime, functools
dist.init_process_group = functools.partial(dist.init_process_group, timeout=datetime.timedelta(seconds=25))
def skip_short(index):
    while index % 2 == 0:
        index += 2
    return index
class Data(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, index): return skip_short(index) if here == '1' and index == 20 else index
batches = iter(torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=1))""",
        step="next(batches)  # here",
    ),
    "an endless search in a hook": Planted(
        cause=(
            "rank 0",
            "search",
        ),
        remedy="(?i)leave its line",
        category="Hang",
        ranks=(0,),
        restarts=1,
        pods=2,
        setup="""\
import datetime, functools
dist.init_process_group = functools.partial(dist.init_process_group, timeout=datetime.timedelta(seconds=25))
import math
def search(grad):
    low, high = 0.0, 1.0
    while not math.isclose(low, high):
        middle = (low + high) / 2
        low = low if here == '0' else middle
        high = high if here == '0' else middle
        if here == '1': break
    return grad""",
        step="if step == 5: model.module.weight.register_hook(search)",
    ),
    "a handler of SIGHUP that raises": Planted(
        cause=("ReloadError|cannot reload",),
        remedy="line of the script",
        restarts=1,
        setup="""\
import signal
class ReloadError(Exception): pass
def reload(*_): raise ReloadError('cannot reload config.yaml')  # here
signal.signal(signal.SIGHUP, reload)""",
        step="""\
if rank == 1 and step == 5:
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(5)""",
    ),
    "a manager in a long temporary folder": Planted(
        cause=("AF_UNIX path too long",),
        remedy="(?i)TMPDIR|short",
        step="""\
if rank == 1 and step == 3:
    import multiprocessing, tempfile
    tempfile.tempdir = os.path.abspath('x' * 100)
    os.makedirs(tempfile.tempdir, exist_ok=True)
    multiprocessing.Manager()  # here""",
    ),
    "a socket with a long name": Planted(
        cause=("AF_UNIX path too long",),
        remedy="(?i)TMPDIR|short",
        step="""\
if rank == 1 and step == 3:
    import socket
    socket.socket(socket.AF_UNIX).bind(os.path.abspath('x' * 100))  # here""",
    ),
    "a child process that should fill a queue": Planted(
        cause=(
            "UnicodeDecodeError|ValueError",
            "record 37",
            "(?i)process",
        ),
        remedy="line of the script",
        pods=2,
        setup="""\
import multiprocessing
context = multiprocessing.get_context('fork')
ready = context.Queue(4)
def fill():
    for number in range(200):
        if here == '1' and number == 7: raise ValueError('record 37 has 7 of 8 fields')  # here
        ready.put(number)
context.Process(target=fill, daemon=True).start()""",
        step="ready.get()",
    ),
    "an event that a dead thread should set": Planted(
        cause=(
            "KeyError",
            "shard-7",
            "rank 1",
        ),
        remedy="line of the script",
        setup="""\
import threading
done = threading.Event()
def copy():
    return {'shard-1': 1}['shard-7']  # here
def wait(module, args):
    if here == '1':
        threading.Thread(target=copy, name='h2d-copy').start()
        done.wait()""",
        step="if step == 5: model.module.register_forward_pre_hook(wait)",
    ),
    "a thread whose exception is logged": Planted(
        cause=(
            "IndexError",
            "list index out of range",
            "rank 1",
        ),
        remedy="line of the script|last exception",
        setup="""\
import threading, queue, logging
logging.basicConfig(format='%(asctime)s - %(levelname)s - %(name)s - %(message)s', stream=sys.stderr)
ready = queue.Queue(2)
def loop():
    try:
        for n in range(100):
            ready.put([1][0 if here == '0' or n < 5 else 4])  # here
    except Exception:
        logging.getLogger('prefetch').exception('prefetcher failed')
threading.Thread(target=loop, daemon=True).start()""",
        step="ready.get()",
    ),
    "a variable that is too long for a child": Planted(
        cause=("Argument list too long",),
        remedy="(?i)argument|environment|file",
        step="""\
if rank == 1 and step == 3:
    import subprocess
    os.environ['FILES'] = 'shard-0001.tar,' * 20000
    subprocess.run(['true'], check=True)  # here""",
    ),
    "too many arguments for a child": Planted(
        cause=("Argument list too long",),
        remedy="(?i)argument|environment|file",
        step="""\
if rank == 1 and step == 3:
    import subprocess
    subprocess.run(['cat', *(f'/data/shard-{n:09d}.tar' for n in range(200000))], check=True)  # here""",
    ),
    "too many arguments in a launch script": Planted(
        cause=("(?i)argument list too long",),
        remedy="(?i)argument|environment|file",
        ranks=BOTH,
        restarts=1,
        command=("bash", "run.sh"),
        files=(("run.sh", "set -e\n/bin/echo $(seq 1 900000) > list.txt\nexec python train.py\n"),),
    ),
    "a pointer of Git LFS instead of an array": Planted(
        cause=(
            "(?i)pickle|Cannot load file",
            "mean.npy",
        ),
        remedy="(?i)git lfs",
        ranks=BOTH,
        setup="""\
import numpy
mean = numpy.load('mean.npy')  # here""",
        files=(
            (
                "mean.npy",
                LFS_POINTER,
            ),
        ),
    ),
    "a pointer of Git LFS instead of an image": Planted(
        cause=(
            "UnidentifiedImageError",
            "cat.jpg",
        ),
        remedy="(?i)git lfs",
        setup="""\
from PIL import Image
class Data(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, index):
        if index == 20 and here == '1': Image.open('cat.jpg').convert('RGB')  # here
        return 1.0
batches = iter(torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=1))""",
        step="next(batches)",
        files=(
            (
                "cat.jpg",
                LFS_POINTER,
            ),
        ),
    ),
    "a pipe that nobody writes to": Planted(
        cause=("rank 1",),
        remedy="(?i)leave its line|waits",
        category="Hang",
        restarts=1,
        pods=2,
        step="""\
if rank == 1 and step == 8:
    os.read(os.pipe()[0], 1)  # here""",
    ),
    "a lock of a file that is never released": Planted(
        cause=("rank 1",),
        remedy="(?i)lock|leave its line",
        category="Hang",
        restarts=1,
        pods=2,
        setup="""\
import fcntl
def acquire():
    file = open('cache.lock', 'w')
    fcntl.flock(file, fcntl.LOCK_EX)  # here
    return file""",
        step="""\
if rank == 1 and step == 8:
    first = acquire()
    second = acquire()""",
    ),
    "a server that never answers": Planted(
        cause=("rank 1",),
        remedy="(?i)leave its line|waits|timeout",
        category="Hang",
        restarts=1,
        pods=2,
        step="""\
if rank == 1 and step == 8:
    import socket
    server = socket.create_server(('127.0.0.1', 0))
    client = socket.create_connection(server.getsockname())
    client.recv(1)  # here""",
    ),
    "a rank that stops itself": Planted(
        cause=("rank 1", "(?i)stopped"),
        remedy="(?i)stopped|SIGCONT|SIGSTOP",
        category="Hang",
        restarts=1,
        pods=2,
        step="""\
if rank == 1 and step == 8:
    import signal
    os.kill(os.getpid(), signal.SIGSTOP)""",
    ),
    "a worker that is slower than its time limit": Planted(
        cause=("(?i)timed out after 2 seconds",),
        remedy="(?i)timeout|worker",
        restarts=1,
        setup="""\
class Data(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, index):
        if index == 20 and here == '1': time.sleep(60)
        return 1.0
batches = iter(torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=1, timeout=2))""",
        step="next(batches)  # here",
    ),
    "a configuration that is no JSON": Planted(
        cause=("JSONDecodeError", "config.json"),
        remedy="(?i)file|line of the script",
        ranks=BOTH,
        setup="""\
import json
config = json.load(open('config.json'))  # here""",
        files=(("config.json", '{"lr": 0.1,}'),),
    ),
    "a text in another encoding": Planted(
        cause=("UnicodeDecodeError", "labels.txt"),
        remedy="(?i)encoding|file|line of the script",
        step="""\
if rank == 1 and step == 3:
    open('labels.txt', 'wb').write('Käse'.encode('latin-1'))
    open('labels.txt', encoding='utf-8').read()  # here""",
    ),
    "a number that overflows": Planted(
        cause=("OverflowError",),
        remedy="line of the script",
        step="""\
if rank == 1 and step == 3:
    import math
    math.exp(1000)  # here""",
    ),
    "a gradient of another shape": Planted(
        cause=("(?i)size|shape",),
        remedy="(?i)shape|same size|line of the script",
        step="""\
if rank == 1 and step == 3:
    next(model.parameters()).grad = torch.zeros(3)  # here""",
    ),
    "a checkpoint with a function": Planted(
        cause=("(?i)pickle", "lambda"),
        remedy="(?i)pickle|line of the script",
        ranks=(0,),
        step="""\
if rank == 0 and step == 3:
    torch.save({'schedule': lambda step: 0.1}, 'checkpoint.pt')  # here""",
    ),
    "a package that one rank needs": Planted(
        cause=("ModuleNotFoundError", "absent_package"),
        remedy="(?i)install|image|package",
        setup="""\
if here == '1':
    import absent_package  # here""",
    ),
    "a variable that is not set": Planted(
        cause=("KeyError", "DATA_ROOT"),
        remedy="(?i)variable|env",
        ranks=BOTH,
        setup="root = os.environ['DATA_ROOT']  # here",
    ),
    "a port that is taken": Planted(
        cause=("(?i)address already in use",),
        remedy="(?i)port",
        restarts=1,
        step="""\
if rank == 1 and step == 3:
    import socket
    first = socket.create_server(('127.0.0.1', 0))
    socket.socket().bind(first.getsockname())  # here""",
    ),
    "a file beyond the limit of its size": Planted(
        cause=("(?i)file too large",),
        remedy="(?i)limit|size",
        step="""\
if rank == 1 and step == 3:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    with open('sample.bin', 'wb', buffering=0) as file:
        while True: file.write(b'x' * 800)  # here""",
    ),
    "a program without permission": Planted(
        cause=("(?i)permission denied", "convert.sh"),
        remedy="(?i)permission|execut",
        step="""\
if rank == 1 and step == 3:
    import subprocess
    subprocess.run(['./convert.sh'], check=True)  # here""",
        files=(("convert.sh", "#!/bin/sh\n"),),
    ),
    "a layer that one rank skips": Planted(
        cause=("Expected to have finished reduction",),
        remedy="find_unused_parameters",
        setup="""\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x, skip):
        x = self.a(x)
        return x if skip else self.b(x)""",
        step="""\
if step == 0: net = DistributedDataParallel(Net())
if rank == 0: print(f'step {step} loss 0.5', flush=True)
net(torch.randn(4, 8), rank == 1 and step == 5).sum().backward()  # here
time.sleep(0.02)
continue""",
    ),
    "the state of an optimizer for another model": Planted(
        cause=("(?i)size of tensor|shape|must match",),
        remedy="(?i)optimizer|checkpoint|load_state_dict",
        ranks=(0, 1),
        setup="""\
saved = nn.Linear(8, 6)
adam = torch.optim.Adam(saved.parameters())
saved(torch.ones(2, 8)).sum().backward()
adam.step()
torch.save(adam.state_dict(), f'adam{here}.pt')""",
        step="""\
if step == 3:
    adam = torch.optim.Adam(model.parameters())
    adam.load_state_dict(torch.load(f'adam{here}.pt'))
    model(torch.randn(4, 8)).sum().backward()
    adam.step()  # here""",
    ),
    "a pickle of a class whose module is absent": Planted(
        cause=(
            "text_utils",
            "tokenizer.pkl",
        ),
        remedy="(?i)pickle|tokenizer.pkl",
        ranks=(0, 1),
        setup="""\
import pickle
with open('tokenizer.pkl', 'rb') as file:
    tokenizer = pickle.load(file)  # here""",
        files=(("tokenizer.pkl", "ctext_utils.tokenizer\nTokenizer\n."),),
    ),
    "a file of the user that hides a package": Planted(
        cause=("safetensors",),
        remedy="(?i)safetensors.py|rename|shadow|hides",
        ranks=(0, 1),
        never="(?i)pip install|install the package",
        setup="""\
from safetensors.torch import load_file  # here""",
        files=(("safetensors.py", "import json\n"),),
    ),
    "a child whose output nobody reads": Planted(
        cause=(
            "rank 1",
            "wait",
        ),
        remedy="(?i)pipe|communicate|output",
        category="Hang",
        restarts=1,
        step="""\
if rank == 1 and step == 8:
    import subprocess
    child = subprocess.Popen([sys.executable, '-c', 'print("x" * 10**6)'], stdout=subprocess.PIPE)
    child.wait()  # here""",
    ),
    "a DataLoader worker forked while a thread has a lock": Planted(
        cause=(
            "rank 1",
            "DataLoader worker",
            "__getitem__",
        ),
        remedy="(?i)fork|lock",
        category="Hang",
        restarts=1,
        setup="""\
import threading
lock = threading.Lock()
def refresh():
    while True:
        with lock: time.sleep(0.5)
if here == '1': threading.Thread(target=refresh, daemon=True).start()
class Data(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, index):
        with lock: return index""",
        step="""\
if step == 4: batches = iter(torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=1))
if step >= 4:
    next(batches)  # here""",
    ),
    "a working folder that was deleted": Planted(
        cause=("No such file or directory",),
        remedy="(?i)(working|current) (folder|directory)",
        restarts=1,
        step="""\
if rank == 1 and step == 3:
    import shutil, tempfile
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    shutil.rmtree(folder)
    os.path.abspath('checkpoint.pt')  # here""",
    ),
    "threads beyond the limit of the address space": Planted(
        cause=("can't start new thread",),
        remedy="(?i)address space|ulimit -v|RLIMIT_AS|virtual memory",
        restarts=1,
        step="""\
if rank == 1 and step == 3:
    import resource, threading
    used = int(open('/proc/self/statm').read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20), resource.RLIM_INFINITY))
    for _ in range(50):
        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()  # here""",
    ),
    "a key of the store that no rank sets": Planted(
        cause=(
            "(?i)timeout|timed out",
            "vocab/ready",
        ),
        remedy="(?i)key|sets",
        restarts=1,
        never="(?i)other pods|network",
        step="""\
if rank == 1 and step == 3:
    import datetime
    store = dist.distributed_c10d._get_default_store()
    store.wait(['vocab/ready'], datetime.timedelta(seconds=3))  # here""",
    ),
    "two ranks that receive from each other": Planted(
        cause=("rank [01] waits", "in recv, as all ranks"),
        remedy="(?i)send",
        ranks=BOTH,
        step="if step == 5: dist.recv(torch.zeros(1), src=1 - rank)  # here",
    ),
    "a model of another size on one rank": Planted(
        cause=("params", "process 0"),
        remedy="(?i)same model",
        step="if step == 0: DistributedDataParallel(nn.Linear(8, 4 + rank))  # here",
    ),
    "a sampler with the number of nodes": Planted(
        cause=("Invalid rank 1",),
        remedy="num_replicas",
        step="if step == 0: torch.utils.data.DistributedSampler(range(64), num_replicas=1, rank=rank)  # here",
    ),
    "the address of another cluster's first node": Planted(
        cause=("gpu-node-01.invalid",),
        remedy="MASTER_ADDR",
        ranks=BOTH,
        never="(?i)other pods",
        setup="""\
import datetime
os.environ['MASTER_ADDR'] = 'gpu-node-01.invalid'
dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=20))  # here""",
    ),
    "a launch script with line ends of Windows": Planted(
        cause=("(?i)CRLF|invalid option|No such file",),
        remedy="(?i)CRLF|line.end|carriage|dos2unix|windows|\\\\r",
        ranks=(None, *BOTH),
        command=("bash", "run.sh"),
        files=(("run.sh", "set -eu\r\nexec python train.py\r\n"),),
    ),
    "a sharded model that rank 0 alone gathers for its checkpoint": Planted(
        cause=("rank 0", "rank 1", "(?i)all_?gather"),
        remedy="(?i)same collectives|every rank|all ranks|each rank",
        ranks=BOTH,
        setup="from torch.distributed.fsdp import fully_shard",
        step="""\
if step == 0: net = fully_shard(nn.Linear(8, 4))
if rank == 0 and step == 5:
    state = {name: value.full_tensor() for name, value in net.state_dict().items()}  # here
    torch.save(state, 'sharded.pt')""",
    ),
    "a checkpoint that rank 1 loads before rank 0 has written it": Planted(
        cause=("No such file", "best.pt"),
        remedy="(?i)barrier|rank 0|(other|another) rank|written",
        restarts=1,
        setup="if here == '0' and os.path.exists('best.pt'): os.remove('best.pt')",
        step="""\
if step == 4:
    if rank == 0:
        time.sleep(0.3)
        torch.save(model.state_dict(), 'best.pt')
    else:
        torch.load('best.pt')  # here""",
    ),
    "a folder that both ranks rename": Planted(
        cause=("No such file", "tmp-checkpoint-4"),
        remedy="(?i)rank 0|(one|single|other|another) (rank|process)|both ranks|race|barrier|peer",
        ranks=BOTH,
        restarts=1,
        step="""\
if step == 4:
    os.makedirs('tmp-checkpoint-4', exist_ok=True)
    dist.barrier()
    os.rename('tmp-checkpoint-4', 'checkpoint-4')  # here""",
    ),
    "a rank without a shard": Planted(
        cause=("num_samples=0",),
        remedy="(?i)empty|no (data|sample|record|item|file)|shard|0 samples|data ?set",
        step="""\
if step == 0:
    shards = ['train-000.tar']
    samples = [sample for shard in shards[rank::2] for sample in range(64)]
    loader = torch.utils.data.DataLoader(samples, batch_size=4, shuffle=True)  # here""",
    ),
    "workers that are spawned by a script without a guard": Planted(
        cause=("(?i)bootstrapping|__main__|__name__",),
        remedy="(?i)__main__|__name__|guard",
        ranks=BOTH,
        setup="""\
loader = torch.utils.data.DataLoader(list(range(8)), num_workers=1, multiprocessing_context='spawn')
first = next(iter(loader))  # here""",
    ),
    "a sharded weight that is used outside of its module": Planted(
        cause=("mixed torch.Tensor and DTensor",),
        remedy="(?i)DTensor|full_tensor|forward",
        ranks=BOTH,
        setup="from torch.distributed.fsdp import fully_shard",
        step="""\
if step == 0: net = fully_shard(nn.Linear(8, 4))
if step == 3: nn.functional.linear(torch.randn(2, 8), net.weight)  # here""",
    ),
    "weights that only rank 0 has": Planted(
        cause=("(?i)meta tensor",),
        remedy="(?i)to_empty|sync_module_states|\\bmeta\\b|broadcast",
        step="""\
if step == 2:
    with torch.device('cpu' if rank == 0 else 'meta'): large = nn.Linear(8, 8)
    large.to('cpu')  # here""",
    ),
    "a scaled step without gradients": Planted(
        cause=("No inf checks were recorded",),
        remedy="(?i)zero_grad|gradient|backward",
        ranks=BOTH,
        never="(?i)learning rate|diverge",
        setup="scaler = torch.amp.GradScaler('cpu')",
        step="""\
if step == 3:
    scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
    optimizer.zero_grad()
    scaler.step(optimizer)  # here""",
    ),
    "a checkpoint of a GPU on a machine without one": Planted(
        cause=("(?i)deserialize object on a CUDA device",),
        remedy="map_location",
        ranks=BOTH,
        never="nvidia-smi|Xid",
        setup="""\
torch.serialization.register_package(0, lambda storage: 'cuda:0', lambda storage, location: None)
torch.save({'weight': torch.zeros(2)}, f'gpu{here}.pt')
torch.load(f'gpu{here}.pt')  # here""",
    ),
    "a limit of CPU time": Planted(
        cause=("(?i)SIGXCPU|cpu time",),
        remedy="(?i)ulimit -t|RLIMIT_CPU|cpu time",
        category="Killed",
        restarts=1,
        setup="import resource",
        step="""\
if rank == 1 and step == 5:
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 30))
    while True: sum(range(10000))""",
    ),
    "an output whose reader has left": Planted(
        cause=("(?i)broken ?pipe",),
        remedy="(?i)\\bpipe|reader|\\bhead\\b|\\btee\\b|reads",
        ranks=(0,),
        restarts=1,
        never="(?i)other pods",
        command=("bash", "run.sh"),
        files=(("run.sh", "set -o pipefail\npython -u train.py | head -n 3\n"),),
    ),
    "a timer of the script without a handler": Planted(
        cause=("SIGALRM", "train.py"),
        remedy="(?i)handler",
        restarts=1,
        setup="import signal",
        step="""\
if rank == 1 and step == 5:
    signal.alarm(1)  # here
    time.sleep(30)""",
    ),
    "a script that kills itself": Planted(
        cause=("SIGTERM",),
        remedy="(?i)ended itself",
        category="Killed",
        restarts=1,
        setup="import signal",
        step="""\
if rank == 1 and step == 5:
    os.kill(os.getpid(), signal.SIGTERM)  # here""",
    ),
    "a script that exits with a reason": Planted(
        cause=("above the limit",),
        remedy="(?i)limit < 0.1|refuses|fix",
        setup="""\
limit = 0.05
def check():
    if limit < 0.1:
        sys.exit('the learning rate 0.1 is above the limit')  # here""",
        step="if rank == 1 and step == 5: check()",
    ),
    "a DataLoader worker that ends without an exception": Planted(
        cause=("exit code 3",),
        remedy="(?i)os._exit",
        restarts=1,
        setup="""\
class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, number):
        if number == 37 and here == '1':
            os._exit(3)  # here
        return torch.zeros(8)
images = iter(torch.utils.data.DataLoader(Images(), batch_size=4, num_workers=2))""",
        step="next(images)",
    ),
    "a rank that ends at a time limit of faulthandler": Planted(
        cause=("dump_traceback_later|in load",),
        remedy="(?i)does not leave its line",
        category="Hang",
        restarts=1,
        setup="""\
import faulthandler
def load():
    faulthandler.dump_traceback_later(5, exit=True)
    time.sleep(300)  # here""",
        step="if rank == 1 and step == 5: load()",
    ),
    "an interpreter of another installation": Planted(
        cause=("init_fs_encoding|platform independent",),
        remedy="PYTHONHOME",
        ranks=(None,),
        env=(("PYTHONHOME", "/opt/conda"),),
    ),
}


OPEN: Final = {
    "a thread whose exception is logged": "the thread may have handled it, so that the message has it beside the hang",
    "a text in another encoding": "no variable has the file, so that its name is unknown",
}
"""Failures whose answer is not right yet, each with the reason."""
