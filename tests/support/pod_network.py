"""Pods as network namespaces of the kernel, joined by a router that enforces NetworkPolicies: a program for tests.

Run as ``unshare --user --map-root-user --net --fork --kill-child python pod_network.py``. It reads a request as JSON
(addresses, the ports on which every pod responds, an nftables ruleset, probes) and prints for each probe whether it
arrived. Everything ends with this process: the kernel removes the namespaces. ``build_ruleset`` translates policies;
it supports the fields that this project writes, and refuses all others.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

CLONE_NEWNET: Final = 0x40000000
PATIENCE: Final = 10.0
Policy = Mapping[str, Any]


@dataclass(frozen=True)
class NetworkPod:
    """One pod, or an address outside of the cluster, which has no namespace and no labels."""

    name: str
    address: str
    namespace: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)


def build_ruleset(
    policies: Iterable[Policy], pods: Sequence[NetworkPod], namespaces: Mapping[str, Mapping[str, str]]
) -> str:
    """Return nftables rules for a router between the pods.

    As in Kubernetes, a pod that no policy of a direction selects is open in that direction. Several policies permit the
    union of their rules. A connection needs both its source's egress and its destination's ingress; responses are free.
    """
    main = ["type filter hook forward priority 0; policy accept;", "ct state established,related accept"]
    chains = {"deny": ["meta l4proto tcp reject with tcp reset", "reject"]}
    sides = {"Egress": ("egress", "to", "saddr", "daddr"), "Ingress": ("ingress", "from", "daddr", "saddr")}
    known = list(policies)
    for kind, (rules, peers, own, second) in sides.items():
        for number, pod in enumerate(pods):
            holding = [p for p in known if kind in p["spec"]["policyTypes"] and _holds(p, pod)]
            if not holding:
                continue
            name = f"{rules}_{number}"
            main.append(f"ip {own} {pod.address} jump {name}")
            chains[name] = [
                f"{source} {port} return".strip()
                for policy in holding
                for rule in policy["spec"].get(rules) or ()
                for source in _addresses(rule.get(peers), policy["metadata"]["namespace"], pods, namespaces, second)
                for port in _ports(rule.get("ports"), pod if kind == "Ingress" else None)
            ] + ["jump deny"]
    chains["forward"] = main  # last, because nft requires the target of a jump to exist
    blocks = "".join(f"  chain {name} {{\n    " + "\n    ".join(lines) + "\n  }\n" for name, lines in chains.items())
    return f"table inet policies {{\n{blocks}}}\n"


def _holds(policy: Policy, pod: NetworkPod) -> bool:
    same = pod.namespace == policy["metadata"]["namespace"]
    return same and _matches(policy["spec"]["podSelector"], pod.labels)


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    _only(selector, "matchLabels", "matchExpressions")
    if not (selector.get("matchLabels") or {}).items() <= labels.items():
        return False
    for expression in selector.get("matchExpressions") or ():
        assert expression["operator"] == "Exists", expression
        if expression["key"] not in labels:
            return False
    return True


def _addresses(
    peers: Sequence[Mapping[str, Any]] | None,
    home: str,
    pods: Sequence[NetworkPod],
    namespaces: Mapping[str, Mapping[str, str]],
    side: str,
) -> list[str]:
    """Return one match per peer; without peers everything matches."""
    if not peers:
        return [""]
    results = []
    for peer in peers:
        if "ipBlock" in peer:
            _only(peer["ipBlock"], "cidr")
            results.append(f"ip {side} {peer['ipBlock']['cidr']}")
            continue
        _only(peer, "namespaceSelector", "podSelector")
        chosen = [
            pod.address
            for pod in pods
            if pod.namespace is not None
            and (
                _matches(peer["namespaceSelector"], namespaces[pod.namespace])
                if "namespaceSelector" in peer
                else pod.namespace == home
            )
            and _matches(peer.get("podSelector", {}), pod.labels)
        ]
        if chosen:
            results.append(f"ip {side} {{ {', '.join(chosen)} }}")
    return results


def _ports(ports: Sequence[Mapping[str, Any]] | None, owner: NetworkPod | None) -> list[str]:
    """Return one match per port; without ports everything matches. A name is that of the destination's port."""
    if not ports:
        return [""]
    numbers = []
    for port in ports:
        _only(port, "port", "protocol")
        number = port["port"]
        if isinstance(number, str):
            assert owner is not None, "a named port in egress"
            number = owner.ports[number]
        numbers.append(f"{port['protocol'].lower()} dport {number}")
    return numbers


def _only(fields: Mapping[str, Any], *known: str) -> None:
    assert not fields.keys() - set(known), f"not translated: {sorted(fields.keys() - set(known))}"


def run(*command: str, text: str = "") -> None:
    """Call a program; its error output is the error."""
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def main() -> None:
    """Build the network, run the probes, print those that arrived."""
    request = json.load(sys.stdin)
    # A write here needs no privilege beyond this namespace's own.
    with open("/proc/sys/net/ipv4/ip_forward", "w", encoding="ascii") as switch:
        switch.write("1")
    talks = []
    for number, address in enumerate(request["addresses"]):
        ours, theirs = socket.socketpair()
        if not (pid := os.fork()):
            ours.close()
            be_a_pod(theirs, address, request["ports"])
        theirs.close()
        talk = ours.makefile("rw", encoding="ascii")
        assert talk.readline() == "apart\n"
        run("ip", "link", "add", f"pod{number}", "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        run("ip", "link", "set", f"pod{number}", "up")
        run("ip", "address", "add", "169.254.1.1/32", "dev", f"pod{number}")
        run("ip", "route", "add", f"{address}/32", "dev", f"pod{number}")
        print("linked", file=talk, flush=True)
        assert talk.readline() == "ready\n"
        talks.append(talk)
    if request["ruleset"]:
        run("nft", "-f", "-", text=request["ruleset"])
    results = []
    for source, address, protocol, port in request["probes"]:
        print(address, protocol, port, file=talks[source], flush=True)
        results.append(talks[source].readline() == "through\n")
    print(json.dumps(results), flush=True)


def be_a_pod(talk: socket.socket, address: str, ports: Mapping[str, Sequence[int]]) -> NoReturn:
    """Respond on the ports and send probes on request, until the router closes the channel."""
    try:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        lines = talk.makefile("rw", encoding="ascii")
        print("apart", file=lines, flush=True)
        assert lines.readline() == "linked\n"
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "set", "eth0", "up")
        run("ip", "address", "add", f"{address}/32", "dev", "eth0")
        run("ip", "route", "add", "169.254.1.1/32", "dev", "eth0")
        run("ip", "route", "add", "default", "via", "169.254.1.1", "dev", "eth0")
        for port in ports["tcp"]:
            threading.Thread(target=accept, args=(socket.create_server((address, port)),), daemon=True).start()
        for port in ports["udp"]:
            server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            server.bind((address, port))
            threading.Thread(target=echo, args=(server,), daemon=True).start()
        print("ready", file=lines, flush=True)
        for line in lines:
            second, protocol, port_text = line.split()
            print("through" if reaches(second, protocol, int(port_text)) else "refused", file=lines, flush=True)
    except Exception as error:
        print(f"pod {address}: {error}", file=sys.stderr, flush=True)
    os._exit(0)


def accept(server: socket.socket) -> None:
    """Accept connections."""
    while True:
        server.accept()[0].close()


def echo(server: socket.socket) -> None:
    """Send received data back."""
    while True:
        server.sendto(*server.recvfrom(100))


def reaches(address: str, protocol: str, port: int) -> bool:
    """Whether a connection, or a datagram and its response, arrive. The router rejects refused ones at once."""
    kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
    with socket.socket(socket.AF_INET, kind) as client:
        client.settimeout(PATIENCE)
        try:
            client.connect((address, port))
            if protocol == "udp":
                client.send(b"?")
                client.recv(100)
        except (ConnectionError, PermissionError):
            return False
    return True


if __name__ == "__main__":
    main()
