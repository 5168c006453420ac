"""Submit a tiny job, wait until it succeeds, delete it. Standard library only: it runs in the operator's image.

usage: helm_test.py JOB.json SECONDS
"""

import contextlib
import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

ACCOUNT = Path(os.environ.get("SERVICE_ACCOUNT", "/var/run/secrets/kubernetes.io/serviceaccount"))


def find_server(env: Mapping[str, str]) -> str:
    """Return the API server's URL: by the address that the kubelet sets, which needs no cluster DNS."""
    if "KUBERNETES_SERVER" in env:
        return env["KUBERNETES_SERVER"]
    host = env.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
    port = env.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


SERVER = find_server(os.environ)


def call(method: str, path: str, body: object = None) -> dict:
    """Call the API server. Raises: urllib.error.HTTPError."""
    request = urllib.request.Request(  # noqa: S310 - the address is the cluster's own
        SERVER + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={
            "Authorization": "Bearer " + (ACCOUNT / "token").read_text().strip(),
            "Content-Type": "application/json",
        },
    )
    context = ssl.create_default_context(cafile=ACCOUNT / "ca.crt") if SERVER.startswith("https") else None
    with urllib.request.urlopen(request, timeout=30, context=context) as response:  # noqa: S310 # nosec B310
        return json.load(response)


def create(jobs: str, job: dict) -> None:
    """Create the job, in place of one that an earlier test left behind. Raises: urllib.error.HTTPError."""
    path = f"{jobs}/{job['metadata']['name']}"
    for _ in range(120):
        try:
            call("POST", jobs, job)
            return
        except urllib.error.HTTPError as error:
            if error.code != 409:
                raise
        print("deleting the job of an earlier test", flush=True)
        with contextlib.suppress(urllib.error.HTTPError):  # deleted meanwhile
            call("DELETE", path)
        time.sleep(0.5)
    raise SystemExit(f"{path} is not deleted after 60 s")


def describe(status: dict) -> str:
    """Return the phase, with reason and message of the first condition that keeps the job from training."""
    phase = status.get("phase") or "not seen by the operator yet"
    if phase == "Succeeded":
        return phase
    for condition in status.get("conditions") or []:
        is_end = condition["type"] in ("Succeeded", "Failed")
        blocks = condition["status"] == "True" if is_end else condition["status"] != "True"
        if blocks and condition.get("message"):
            return f"{phase}: {condition.get('reason')}: {condition['message']}"
    return phase


def watch(path: str, seconds: float) -> int:
    """Follow the job; return the exit code."""
    deadline = time.monotonic() + seconds
    printed = ""
    while time.monotonic() < deadline:
        status = call("GET", path).get("status") or {}
        line = describe(status)
        if line != printed:
            print(line, flush=True)
            printed = line
        if status.get("phase") == "Succeeded":
            return 0
        if status.get("phase") == "Failed":
            print(json.dumps(status.get("lastFailure") or {}, indent=2))
            return 1
        time.sleep(0.5)
    print(f"no end after {seconds:.0f} s", flush=True)
    return 1


def main(job: dict, seconds: float) -> int:
    """Run the test."""
    meta = job["metadata"]
    jobs = f"/apis/{job['apiVersion']}/namespaces/{meta['namespace']}/ddptrainingjobs"
    path = f"{jobs}/{meta['name']}"
    try:
        create(jobs, job)
    except urllib.error.HTTPError as error:
        print(f"the API server refused the job: HTTP {error.code} {error.read().decode(errors='replace')}")
        return 1
    print(f"created {meta['namespace']}/{meta['name']}", flush=True)
    try:
        return watch(path, seconds)
    except urllib.error.HTTPError as error:
        print(f"cannot read the job: HTTP {error.code}; Helm removes this account when its --timeout is over")
        return 1
    finally:
        with contextlib.suppress(OSError):
            call("DELETE", path)


if __name__ == "__main__":
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text()), float(sys.argv[2])))
