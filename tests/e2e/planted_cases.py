"""The planted failures: one short job for each fault, and what the three outputs must contain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from .outside_faults import Fault, delete_pod, drain_all_nodes, preempt_pod, stop_operator

_START: Final = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from datetime import timedelta

def fault():
    print(f"fault at {time.time():.1f}", flush=True)

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

def train(step):
    optimizer.zero_grad()
    loss = model(torch.ones(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    time.sleep(0.2)
"""
_LOOP: Final = """
for step in range(1, 2000):
    train(step)
    if step == 20 and rank == 1:
        fault()
        FAULT
"""
TRAIN: Final = _START + "for step in range(1, 2000):\n    train(step)\n"
_SHORT: Final = _START + "for step in range(1, 10):\n    train(step)\nfault()\ndist.destroy_process_group()\n"
_QUICK: Final = {"stallSeconds": 10, "startSeconds": 60, "checkpointSeconds": 60}


def failing(statement: str) -> str:
    """Return a script whose rank 1 runs a statement after step 20."""
    return _START + _LOOP.replace("FAULT", statement)


@dataclass(frozen=True)
class Case:
    """One fault. ``get``, ``describe``, ``why``: what each output contains, as regular expressions.

    ``pod``: members of the pod's spec; ``container``: of the training container; ``objects``: created before the job.
    """

    script: str
    get: str
    describe: tuple[str, ...]
    why: tuple[str, ...]
    spec: Mapping[str, Any] = field(default_factory=dict)
    pod: Mapping[str, Any] = field(default_factory=dict)
    container: Mapping[str, Any] = field(default_factory=dict)
    objects: tuple[Mapping[str, Any], ...] = ()
    inflict: Fault | None = None
    """Plants the fault from outside once the job trains, and removes it afterwards."""
    event: str = ""
    """The reason of the kubelet's Event from which the time counts; empty: it counts from the fault itself."""

    prints_time: bool = False
    """Whether a sidecar prints the time of the fault, although the script does not."""

    @property
    def is_planted_at_once(self) -> bool:
        """Whether the fault exists as soon as the job does."""
        is_later = self.prints_time or self.event or self.inflict is not None
        return self.script in ("", TRAIN) and not is_later


def build_sidecar(command: list[str], **members: Any) -> dict[str, Any]:
    """Return a pod's spec with a native sidecar of the same image."""
    container = {"name": "shipper", "command": command, "restartPolicy": "Always", "imagePullPolicy": "IfNotPresent"}
    return {"initContainers": [{**container, **members}]}


def build_init_container(name: str, command: str) -> dict[str, Any]:
    """Return an init container of the same image."""
    return {"name": name, "command": ["sh", "-c", command], "imagePullPolicy": "IfNotPresent"}


def build_server(port: int) -> dict[str, Any]:
    """Return a pod's spec with a sidecar that serves the port before the training container starts."""
    probe = {"tcpSocket": {"port": port}, "periodSeconds": 1, "failureThreshold": 120}
    return build_sidecar(["python3", "-m", "http.server", str(port)], startupProbe=probe)


_UNTIL_CUT: Final = (
    _START
    + """
for step in range(1, 2000):
    train(step)
    if step == 20 and rank == 0:
        open("/flag/cut", "w").close()
"""
)
# A route of the kind blackhole: pod 0 receives, and what it sends to pod 1 is dropped without an error for pod 1.
_CUT: Final = """
import os, socket, struct, sys, time

AF_INET, HOST, MAIN_TABLE, BOOT, BLACKHOLE, DESTINATION = 2, 32, 254, 3, 6, 1
NEW_ROUTE, CREATE_AND_CONFIRM, HEADER = 24, 0x605, 16

if os.environ["JOB_COMPLETION_INDEX"] == "0":
    job = socket.gethostname().rpartition("-")[0]
    peer = f"{job}-1.{job.rpartition('-')[0]}"
    while len(sys.argv) > 1 and not os.path.exists(sys.argv[1]):
        time.sleep(0.2)
    address = None
    while address is None:
        try:
            address = socket.inet_aton(socket.gethostbyname(peer))
        except OSError:
            time.sleep(0.2)
    route = struct.pack("=8BI", AF_INET, HOST, 0, 0, MAIN_TABLE, BOOT, 0, BLACKHOLE, 0)
    route += struct.pack("=HH4s", 8, DESTINATION, address)
    header = struct.pack("=IHHII", HEADER + len(route), NEW_ROUTE, CREATE_AND_CONFIRM, 1, 0)
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    link.send(header + route)
    error = struct.unpack_from("=i", link.recv(4096), HEADER)[0]
    print(f"fault at {time.time():.1f}" if error == 0 else f"no route: {os.strerror(-error)}", flush=True)
time.sleep(1e6)
"""


def build_partition(flag: str = "") -> dict[str, Any]:
    """Return a pod's spec whose native sidecar cuts pod 0 off from pod 1. ``flag``: once this file exists."""
    privileges = {"runAsUser": 0, "runAsNonRoot": False, "capabilities": {"add": ["NET_ADMIN"]}}
    command = ["python3", "-c", _CUT, *filter(None, [flag])]
    mount = {"name": "flag", "mountPath": "/flag"}
    return build_sidecar(command, securityContext=privileges, volumeMounts=[mount]) | {
        "volumes": [{"name": "flag", "emptyDir": {}}]
    }


_WRITE_CACHE: Final = "open('/cache/x', 'wb').write(bytes(40 << 20)); time.sleep(600)"

CASES: Final[dict[str, Case]] = {
    "exception": Case(
        failing("{}['label']"),
        "UserError|RepeatedFailure",
        ("KeyError: 'label'", "rank 1"),
        ("KeyError: 'label'", "rank 1", "(?i)fix"),
    ),
    "exit code": Case(
        failing("os._exit(3)"),
        "RepeatedFailure|Unknown|UserError",
        ("exit(ed)? (with )?code 3", "rank 1"),
        ("exit(ed)? (with )?code 3", "rank 1"),
    ),
    "segmentation fault": Case(
        failing("os.kill(os.getpid(), signal.SIGSEGV)"),
        "Crash|Native|Signal|Unknown|Failed|Restarting",
        ("SIGSEGV", "rank 1"),
        ("SIGSEGV", "rank 1"),
        spec={"recovery": {"inPlaceRestarts": 0, "maxRestarts": 0}},
    ),
    "collective of another size": Case(
        failing("dist.all_reduce(torch.ones(99))"),
        "Failed|Restarting|Running",
        ("(?i)size|mismatch|shape", "rank"),
        ("(?i)size|mismatch|shape",),
        spec={"recovery": {"inPlaceRestarts": 0, "maxRestarts": 0}},
    ),
    "hang": Case(
        failing("time.sleep(1e6)"),
        "Stalled|Hang",
        ("rank 1",),
        ("rank 1", "no step"),
        spec={"watchdog": _QUICK},
    ),
    "busy loop": Case(
        failing("exec('while True: pass')"),
        "Stalled|Hang",
        ("rank 1",),
        ("rank 1", "no step"),
        spec={"watchdog": _QUICK},
    ),
    "memory of the pod": Case(
        failing("hoard = [bytearray(os.urandom(1 << 20)) * 64 for _ in range(100)]"),
        "OOM",
        ("(?i)memory",),
        ("(?i)memory", "(?i)raise|reduce"),
        container={"resources": {"requests": {"cpu": "100m"}, "limits": {"memory": "900Mi"}}},
    ),
    "loss that is not finite": Case(
        failing("optimizer.param_groups[0]['lr'] = float('nan')"),
        "nan",
        ("(?i)nan",),
        ("loss is nan", "(?i)learning rate"),
    ),
    "builds that do not match": Case(
        failing("raise RuntimeError('operator torchvision::nms does not exist')"),
        "UserError|RepeatedFailure",
        ("torchvision::nms", "rank 1"),
        ("torchvision::nms", "(?i)builds? of torch|same|match"),
    ),
    "read-only folder": Case(
        failing("torch.save(model.state_dict(), '/data/checkpoint.pt')"),
        "UserError|RepeatedFailure",
        ("(?i)read-only", "rank 1"),
        ("(?i)read-only", "(?i)mount|writ"),
        pod={"volumes": [{"name": "data", "emptyDir": {}}]},
        container={"volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}]},
    ),
    "missing module": Case(
        "import time; print(f'fault at {time.time():.1f}', flush=True)\nimport no_such_package\n",
        "UserError|RepeatedFailure",
        ("No module named 'no_such_package'",),
        ("no_such_package", "(?i)install|image|code.pip"),
    ),
    "missing program": Case(
        "",
        "Failed",
        ("no-such-program",),
        ("no-such-program", "(?i)not found"),
        container={"command": ["no-such-program"]},
    ),
    "missing image": Case(
        TRAIN, "ImagePull", ("nobody/has-this",), ("nobody/has-this", "(?i)image"),
        container={"image": "localhost/nobody/has-this:1", "imagePullPolicy": "IfNotPresent"},
    ),
    "missing ConfigMap": Case(
        TRAIN, "Pending|ConfigError|Config", ("settings",), ("settings", "(?i)create"),
        container={"envFrom": [{"configMapRef": {"name": "settings"}}]},
    ),
    "missing claim": Case(
        TRAIN, "Pending", ("no-such-claim",), ("no-such-claim",),
        pod={"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "no-such-claim"}}]},
    ),
    "no node with room": Case(
        TRAIN, "Unschedulable", ("Insufficient cpu",), ("cpu", "(?i)add|reduce|free"),
        container={"resources": {"requests": {"cpu": "500"}}},
    ),
    "taken rendezvous port": Case(
        TRAIN, "Network|Restarting|Failed", ("29400", "in use"), ("29400", "(?i)port"),
        pod=build_server(29400),
    ),
    "taken metrics port": Case(
        TRAIN, "NoMetricsPage|Network|Failed|Running", ("9400|metrics port",), ("metrics.port",),
        pod=build_server(9400),
    ),
    "volume over its limit": Case(
        "import time\nprint(f'fault at {time.time():.1f}', flush=True)\n" + _WRITE_CACHE,
        "Running|Restarting|Failed",
        ('EmptyDir volume "cache" exceeds the limit',),
        ("sizeLimit", "cache"),
        pod={"volumes": [{"name": "cache", "emptyDir": {"sizeLimit": "10Mi"}}]},
        container={"volumeMounts": [{"name": "cache", "mountPath": "/cache"}]},
        event="Evicted",
    ),
    "DNS": Case(
        TRAIN, "PeerUnreachable", ("does not resolve|resolve",), ("resolve", "DNS"),
        pod={"dnsPolicy": "None", "dnsConfig": {"nameservers": ["192.0.2.77"]}},
    ),
    "sidecar that does not end": Case(
        _SHORT, "Finished", ("waits for shipper",), ("native sidecar", "shipper"),
        pod=build_sidecar(["python3", "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(900)"])
        | {"terminationGracePeriodSeconds": 100},
    ),
    "rank that ends early": Case(
        failing("sys.exit(0)"),
        "Stalled|Hang|Failed|Network|Restarting|UserError",
        ("rank 1|ranks? .*ended",),
        ("rank 1|ended",),
    ),
    "no progress to see": Case(
        "import time\nprint(f'fault at {time.time():.1f}', flush=True)\ntime.sleep(1000)\n",
        "NoStepYet",
        ("logPatterns|no step",),
        ("logPatterns|exporter",),
    ),
    "sidecar that crashes": Case(
        TRAIN, "Running", ("shipper", "restarts"), ("shipper", "kubectl logs .* -c shipper"),
        pod=build_sidecar(["python3", "-c", "raise SystemExit(3)"]),
    ),
    "missing service account": Case(
        TRAIN, "PodsForbidden", ("(?i)service ?account.*nobody",), ("nobody", "(?i)service account"),
        pod={"serviceAccountName": "nobody"},
    ),
    "quota of the namespace": Case(
        TRAIN, "PodsForbidden", ("exceeded quota",), ("exceeded quota", "(?i)quota"),
        objects=({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"},
                  "spec": {"hard": {"pods": "1"}}},),
    ),
    "partition at the start": Case(
        TRAIN, "PeerUnreachable", ("(?i)pod 1.*pod 0|does not respond|timed out",), ("(?i)network|NetworkPolic",),
        pod=build_partition(),
        prints_time=True,
    ),
    "partition in training": Case(
        _UNTIL_CUT, "Stalled|PeerUnreachable|Restarting|Network", ("(?i)pod 1|rank 1|timed out|unreachable",),
        ("(?i)network|NetworkPolic",),
        spec={"watchdog": _QUICK},
        pod=build_partition("/flag/cut"),
        container={"volumeMounts": [{"name": "flag", "mountPath": "/flag"}]},
    ),
    "preempted pod": Case(
        TRAIN, "Unschedulable|PodReplacement|Disrupted|Restarting", ("(?i)preempt",),
        ("(?i)preempt", "(?i)not counted|add nodes"),
        container={"resources": {"requests": {"cpu": "1100m"}}},
        inflict=preempt_pod,
    ),
    "deleted pod": Case(
        TRAIN, "PodReplacement|Restarting", ("(?i)deleted",), ("(?i)deleted",), inflict=delete_pod
    ),
    "liveness probe": Case(
        "import time\nprint(f'fault at {time.time():.1f}', flush=True)\ntime.sleep(1000)\n",
        "Killed",
        ("livenessProbe failed: .*connection refused",),
        ("livenessProbe of container",),
        container={"livenessProbe": {"httpGet": {"path": "/", "port": 8081}, "periodSeconds": 2}},
    ),
    "init container that waits": Case(
        TRAIN, "InitContainerRunning", ("init container wait-db",),
        ("wait-db is: no db yet", "kubectl logs .* -c wait-db"),
        pod={"initContainers": [build_init_container("wait-db", "echo no db yet; sleep 1000")]},
    ),
    "init container that fails": Case(
        TRAIN, "Restarting|Failed", ("init container fetch.*no such bucket",), ("fetch", "no such bucket"),
        pod={"initContainers": [build_init_container("fetch", "echo started; echo no such bucket >&2; exit 3")]},
    ),
    "missing StorageClass": Case(
        TRAIN, "VolumeNotReady", ("claim slow: .*fast-nfs",), ("Create the StorageClass fast-nfs",),
        pod={"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "slow"}}]},
        objects=({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "slow"},
                  "spec": {"accessModes": ["ReadWriteMany"], "storageClassName": "fast-nfs",
                           "resources": {"requests": {"storage": "1Gi"}}}},),
    ),
    "missing key": Case(
        TRAIN, "VolumeNotReady", ("volume cfg is ConfigMap settings",), ("Add the key a.yaml",),
        pod={"volumes": [
            {"name": "cfg", "configMap": {"name": "settings", "items": [{"key": "a.yaml", "path": "a"}]}}
        ]},
        objects=({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"b": "c"}},),
    ),
    "wrong address": Case(
        TRAIN, "PeerUnreachable", ("192.0.2.99.*pod 0 has the address",), ("hostAliases",),
        pod={"hostAliases": [{"ip": "192.0.2.99", "hostnames": ["wrong-address-1-0.wrong-address"]}]},
    ),
    "drained nodes": Case(
        TRAIN, "Unschedulable", ("EvictionByEvictionAPI", "unschedulable"), ("unschedulable", "(?i)uncordon|nodes"),
        inflict=drain_all_nodes,
    ),
    "dead operator": Case(
        TRAIN, "Running", (".",), ("(?i)no operator has", "(?i)check that the operator"), inflict=stop_operator
    ),
}  # fmt: skip
