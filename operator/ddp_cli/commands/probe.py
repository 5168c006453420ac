"""Kill a rank's process or read its progress: `ddp drill` runs this in a training pod, or beside a local run.

One file, standard library only, Python 3.10: it is an argument of the container's ``python3 -c``. Prints JSON lines.

    probe.py kill <rank> [<pid of an ancestor>]
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


def find_parent(pid: int | str) -> int:
    """Return a process's parent, 0 if there is none."""
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return int(stream.read().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def is_descendant(pid: int, ancestor: int) -> bool:
    """Return whether a process descends from another."""
    while pid > 1:
        if pid == ancestor:
            return True
        pid = find_parent(pid)
    return False


def find_worker(rank: int, ancestor: int = 0) -> int:
    """Return the process of a rank, 0 if there is none. The rank's shim records it in the pod's runtime directory."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        runtime = read_environment(name).get(b"DDP_RUNTIME_DIR")
        if runtime is None or (ancestor and not is_descendant(int(name), ancestor)):
            continue
        for path in glob.glob(os.path.join(os.fsdecode(runtime), "workers", "*.json")):
            with open(path, encoding="utf-8") as stream:
                record = json.load(stream)
            if (record["pid"], record["rank"]) == (int(name), rank):
                return int(name)
    return 0


def kill(rank: int, ancestor: int = 0) -> int:
    """Kill a rank's process; return its number, 0 if there is none."""
    pid = find_worker(rank, ancestor)
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
        print(json.dumps({"killed": kill(*map(int, argv[1:]))}), flush=True)
        return
    while True:
        print(json.dumps(read_report(int(argv[1]))), flush=True)
        time.sleep(float(argv[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
