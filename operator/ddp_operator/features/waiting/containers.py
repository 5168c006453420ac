"""For which containers pods wait before their training container starts, and after it has ended. Pure."""

from typing import Final

from ddp_operator.api.texts import format_more_pods
from ddp_operator.decide import conditions as c
from ddp_operator.decide.attempt import ObservedAttempt
from ddp_operator.decide.conditions import Fact
from ddp_operator.reading.containers import find_init_container, list_injected_containers, list_remaining_containers

_MOST_NAMED: Final = 10


def explain_missing_ranks(attempt: ObservedAttempt, fact: Fact) -> Fact:
    """Return Rendezvoused of pods that do not run yet, with the init container that one of them runs."""
    pods = attempt.pods.newest.values()
    initializing = [(pod, container) for pod in pods if (container := find_init_container(pod))]
    if not initializing:
        return fact
    pod, container = initializing[0]
    more = format_more_pods(len(initializing) - 1)
    waits = f"; the startupProbe of sidecar {container.name} has not succeeded" if container.is_sidecar else ""
    message = (
        f"{fact.message}; pod {pod.name}{more} runs init container {container.name} since {container.since}{waits}"
    )
    return Fact(c.RENDEZVOUSED, "False", c.INIT_CONTAINER_RUNNING, message)


def explain_remaining_pods(attempt: ObservedAttempt, fact: Fact) -> Fact:
    """Return Progressing of pods whose training containers have ended, with the containers that still run."""
    running = [pod for pod in attempt.pods.newest.values() if pod.running]
    if not running:
        return fact
    more = format_more_pods(len(running) - 1)
    containers = ", ".join(list_remaining_containers(running[0])[:_MOST_NAMED]) or "the kubelet"
    message = f"all ranks have ended with exit code 0; pod {running[0].name}{more} waits for {containers}"
    injected = list_injected_containers(running[0])
    if injected:
        message += f"; an admission webhook or policy of the cluster injected {injected[0]}"
    return Fact(c.PROGRESSING, "False", c.FINISHED, message)
