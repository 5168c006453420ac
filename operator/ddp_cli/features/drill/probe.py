"""Kill a rank's process or read its progress: `ddp drill` runs this in a training pod, or beside a local run.

One file, standard library only, Python 3.10: it is an argument of the container's ``python3 -c``. Prints JSON lines.

    probe.py kill <rank>
    probe.py watch <port> <interval in seconds>
"""

import glob
import json
import os
import signal
import sys
import time
import urllib.request


def read_environment(pid: int | str) -> dict[bytes, bytes]:
    """Return a process's environment; empty if it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            pairs = [item.partition(b"=") for item in stream.read().split(b"\0")]
    except OSError:
        return {}
    return {name: value for name, _, value in pairs}


def find_worker(rank: int, folder: str = "") -> int:
    """Return the process of a rank, 0 if there is none. The rank's shim records it in the pod's runtime directory.

    ``folder``: consider only pods of this run.
    """
    for name in filter(str.isdigit, os.listdir("/proc")):
        runtime = os.fsdecode(read_environment(name).get(b"DDP_RUNTIME_DIR", b""))
        if not runtime or not f"{runtime}/".startswith(f"{folder}/" if folder else ""):
            continue
        for path in glob.glob(os.path.join(runtime, "workers", "*.json")):
            with open(path, encoding="utf-8") as stream:
                record = json.load(stream)
            if (record["pid"], record["rank"]) == (int(name), rank):
                return int(name)
    return 0


def kill(rank: int, folder: str = "") -> int:
    """Kill a rank's process; return its number, 0 if there is none."""
    pid = find_worker(rank, folder)
    if pid:
        os.kill(pid, signal.SIGKILL)
    return pid


def read_report(port: int) -> dict[str, float]:
    """Return the numbers of a pod's first rank and its restarts; empty if the port does not respond."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/report", timeout=2) as answer:  # nosec B310
            report = json.loads(answer.read(1 << 20))
        rank = (report.get("ranks") or [{}])[0]
        numbers = {"step": rank.get("step"), "steps": rank.get("steps"), "interval": rank.get("stepInterval")}
        numbers |= {"restarts": report.get("restarts"), "running": float(report.get("phase") == "Running")}
    except (OSError, ValueError, AttributeError, LookupError):
        return {}
    return {name: number for name, number in numbers.items() if number is not None}


def main(argv: list[str]) -> None:
    """Run the subcommand."""
    if argv[0] == "kill":
        print(json.dumps({"killed": kill(int(argv[1]))}), flush=True)
        return
    while True:
        print(json.dumps(read_report(int(argv[1]))), flush=True)
        time.sleep(float(argv[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
