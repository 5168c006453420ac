"""Whether another attempt may help, by where the values of failing code come from: small scripts that raise."""

from __future__ import annotations

import runpy
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ddp_pod.contract.names import EXIT_USER_ERROR
from tests.support.rank_errors import examine

_CLIENT = """\
from . import transport
class ServiceError(Exception): pass
def fetch(url):
    answer = transport.call(url)
    if 'error' in answer: raise ServiceError(answer['error'])
    return answer['item']
"""
_TRANSPORT = """\
import json
import urllib.request
def call(url):
    with urllib.request.urlopen(url) as response: return json.loads(response.read())
"""
_TOKENS = """\
class TokenError(Exception): pass
def encode(word, vocabulary):
    if word not in vocabulary: raise TokenError(f'{word} is unknown')
    return vocabulary[word]
"""


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"error": "later"}' if self.path == "/busy" else b"{}"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Yield the address of a service that answers with an empty object."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a client of a service and a library that needs nothing from outside."""
    folder = tmp_path / "site-packages"
    for name, text in (("client/__init__", _CLIENT), ("client/transport", _TRANSPORT), ("tokens", _TOKENS)):
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(folder)
    yield
    for name in ("client", "client.transport", "tokens"):
        sys.modules.pop(name, None)


def is_final(script: str, folder: Path, url: str = "") -> bool:
    """Return whether no attempt follows the exception of a script."""
    path = folder / "train.py"
    path.write_text(f"URL = {url!r}\nclass Own(Exception): pass\n{script}\n")
    failure = examine(lambda: runpy.run_path(str(path), run_name="__main__"), folder)
    return failure.container_exit_code == EXIT_USER_ERROR


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    "script",
    [
        "import struct; struct.unpack('<I', b'abc')",
        "import base64; base64.b64decode('abc')",
        "import csv; csv.reader([], dialect='semicolon')",
        "import json; json.loads('{')",
        "import sqlite3; sqlite3.connect(':memory:').execute('select * from runs')",
        "import os\nwith open(os.devnull, 'w') as file: file.read()",
        "import shutil; shutil.copyfile(__file__, __file__)",
        "import graphlib; list(graphlib.TopologicalSorter({1: [2], 2: [1]}).static_order())",
        "import zoneinfo; zoneinfo.ZoneInfo('Europe/Nowhere')",
        "import ctypes; ctypes.CDLL('libnotthere.so')",
        "import tokens; tokens.encode('b', {'a': 1})",
        "columns = [1, 2]\nif len(columns) != 3: raise ValueError('expected 3 columns')",
        "names = {'a': 1}\nif 'vit' not in names: raise ValueError('backbone vit not found')",
        "import sys; sys.exit('expected 3 files, found 2')",
        "try: open('cache.json')\nexcept FileNotFoundError: {}['lr']",
        "import random\nrows = ['1', 'n/a']\nrandom.shuffle(rows)\n[float(row) for row in rows]",
        "import torch\nx = torch.rand(4, 3)\nif x.shape[1] != 4: raise ValueError('expected 4 features')",
        "import numpy as np\nx = np.random.rand(3)\nif len(x) != 4: raise ValueError('expected 4 values')",
        "import random\nrandom.seed(1)\nif random.random() < 2: raise ValueError('bad draw')",
        "import time\nlast = {}\nprint(last['step'], time.time())",
        "import torch.distributed as dist\nif not dist.is_initialized(): raise ValueError('no group')",
        "class Rows:\n    def __len__(self): return 4\n    def __getitem__(self, i):\n"
        "        if i == 2: raise ValueError('no label')\n        return i\n"
        "from torch.utils.data import DataLoader\nlist(DataLoader(Rows()))",
        "import torch, torch.distributed as dist\nk = torch.tensor([9])\ndef agree(): dist.all_reduce(k)\n"
        "if False: dist.all_reduce(k)\ntorch.ones(3).topk(k.item())",
    ],
)
def test_exception_without_anything_from_outside_is_final(script: str, tmp_path: Path) -> None:
    assert is_final(script, tmp_path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # scripts that close nothing
@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    "script",
    [
        "import json, urllib.request\nmeta = json.loads(urllib.request.urlopen(URL).read())\nmeta['classes']",
        "import json, urllib.request\ndef get(): return json.load(urllib.request.urlopen(URL))\nmeta = get()\nmeta[1]",
        "import json, urllib.request\ndef pick(meta): return meta['x']\npick(json.load(urllib.request.urlopen(URL)))",
        "import urllib.request\nanswer = urllib.request.urlopen(URL)\nif answer.status == 200: raise Own('no data')",
        "import client; client.fetch(URL + '/busy')",
        "import client; client.fetch(URL)",
        "import urllib.request\ndef load():\n    urllib.request.urlopen(URL)\n    raise Own('gave up')\nload()",
        "import subprocess; int(subprocess.run(['echo'], capture_output=True, text=True).stdout)",
        "import subprocess\ncode = subprocess.call(['false'])\nif code: raise Own('not packed')",
        "import os\nif not os.path.exists('ready.txt'): raise Own('peer is late')",
        "import shutil\nif shutil.disk_usage('.').free: raise Own('no room')",
        "import time\nbegan = time.monotonic()\nif time.monotonic() >= began: raise Own('too slow')",
        "import random\ndef draw(): return random.gauss(0, 1)\nx = draw()\nif x < 99: raise Own('too high')",
        "import threading\nlock = threading.Lock()\nlock.acquire()\nif not lock.acquire(timeout=0.1): raise Own('')",
        "import torch\nloss = torch.tensor(float('nan'))\nif not torch.isfinite(loss): raise Own('stop')",
        "import torch, torch.distributed as dist\nok = torch.zeros(1)\ndef agree(): dist.all_reduce(ok)\n"
        "if False: dist.all_reduce(ok)\nif ok.item() == 0: raise Own('a peer has no data')",
        "import pathlib, struct\npathlib.Path('index.bin').write_bytes(b'abc')\nwith open('index.bin', 'rb') as file:\n"
        "    struct.unpack('<q', file.read(8))",
        "import signal, time\ndef end(*_): raise Own('too slow')\nsignal.signal(signal.SIGUSR1, end)\n"
        "signal.raise_signal(signal.SIGUSR1)",
        "import sqlite3; sqlite3.connect('/proc/no-such-folder/x.db')",
        "raise Own('the feature store does not answer')",
        "raise ConnectionError('no peer')",
        "if URL is not None: raise Own('no label')",
        "import os\nif os.getpid(): raise RuntimeError('once')",
    ],
)
def test_value_from_outside_may_be_another_one_in_the_next_attempt(
    script: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not is_final(script, tmp_path, url)
