"""The services of features: their context, start and tasks. A fault of a service ends its own work only."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from ddp_operator.api.cluster import Key, Snapshot
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.faults import FAULTS
from ddp_operator.api.kubeobjects import utc_now
from ddp_operator.api.schema import KERNEL, Schema
from ddp_operator.api.status import Profile
from ddp_operator.decide.hooks import Feature, Service, build_schema
from ddp_operator.decide.state import Refusal
from ddp_operator.kube.cache import ObjectCache
from ddp_operator.kube.client import ApiClient
from ddp_operator.reconcile.completing import CompletingService

logger = logging.getLogger(__name__)

SECONDS_TO_PREPARE = 30.0
"""Limit of what all jobs wait for at the start, in sum."""
SECONDS_TO_CLOSE = 4.0
"""The same at the end of the process: Kopf waits five seconds."""
PAUSE = 30.0
"""Seconds before a service that has ended runs again."""


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """What a service uses.

    ``settings``: of its feature's type; ``schema``: with the fields of all features; ``on_change``: makes a job's next
    pass due.
    """

    client: ApiClient
    store: ObjectCache
    namespaces: Sequence[str]
    on_change: Callable[[Key], None]
    settings: msgspec.Struct | None = None
    schema: Schema = KERNEL
    clock: Callable[[], datetime] = utc_now


class _Unstarted(CompletingService):
    """Stands for a service without which jobs would run with other values than they have to."""

    async def find_values(self, snapshot: Snapshot) -> Profile | Refusal | None:
        raise RuntimeError("the feature could not start")


def start_services(
    features: Sequence[Feature], settings: Mapping[str, msgspec.Struct], build: Callable[..., ServiceContext]
) -> dict[str, Service]:
    """Return the services by the name of their feature. ``build``: the context with these ``settings``.

    Jobs wait for one that has to complete their specs and cannot start. Raises: InvalidManifest for invalid settings.
    """
    schema = build_schema(tuple(features))
    services: dict[str, Service] = {}
    for feature in features:
        if feature.start is None:
            continue
        try:
            service = feature.start(build(settings=settings.get(feature.name), schema=schema))
            if service is not None:
                services[feature.name] = service
        except InvalidManifest:
            raise
        except Exception as error:
            FAULTS.add(f"feature {feature.name}", "start", error)
            if feature.fields is not None and feature.fields.completion is not None:
                services[feature.name] = _Unstarted()
    return services


async def prepare_services(services: Mapping[str, Service]) -> None:
    """Prepare all services, before the first pass. One that fails or takes too long has less to say at first."""
    try:
        async with asyncio.timeout(SECONDS_TO_PREPARE):
            await asyncio.gather(*(_contain(name, service.prepare) for name, service in services.items()))
    except TimeoutError as error:
        FAULTS.add("features", "start", error)
        logger.warning("features take more than %g s to start; the jobs no longer wait for them", SECONDS_TO_PREPARE)


async def close_services(services: Mapping[str, Service]) -> None:
    """Close all services."""
    with suppress(TimeoutError):
        async with asyncio.timeout(SECONDS_TO_CLOSE):
            await asyncio.gather(*(_contain(name, service.close) for name, service in services.items()))


async def run_service(name: str, service: Service) -> None:
    """Run a service for ever: one that ends or fails starts again after a pause."""
    while True:
        await _contain(name, service.run)
        await asyncio.sleep(PAUSE)


async def _contain(name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    try:
        await work()
    except Exception as error:
        FAULTS.add(f"feature {name}", "service", error)
