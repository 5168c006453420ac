"""The Job that stores the record of an ended job: it is created, and deleted after its end."""

import asyncio
from typing import Final

from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.record import encode_record
from ddp_operator.decide.hooks import Service
from ddp_operator.decide.refusals import refuse_invalid
from ddp_operator.decide.state import FeatureAction, Outcome
from ddp_operator.features.history.manifests import build_history_job
from ddp_operator.features.history.reading import read_record
from ddp_operator.features.history.review import STORE, find_job
from ddp_operator.manifests.template import resolve_template
from ddp_operator.reconcile.acting import ActionContext
from ddp_operator.reconcile.turns import Payer

# Each record takes some megabytes until its Job is created.
_RECORDS_AT_ONCE: Final = 4


class HistoryStore(Service):
    """Stores records. ``image``: for jobs of which no pod has run; empty: that of the job."""

    def __init__(self, image: str = "") -> None:
        self._image = image
        self._gate = asyncio.Semaphore(_RECORDS_AT_ONCE)

    async def act(self, action: FeatureAction, context: ActionContext) -> Outcome:
        """Create or delete the Job. Raises: Refused, ClusterError."""
        if action == STORE:
            return await self._store(context)
        job = context.job
        view = find_job(context.observation, job.name)
        if view is not None:
            version = view.raw["metadata"]["resourceVersion"]
            await context.cluster.delete("Job", job.namespace, view.name, uid=view.uid, resource_version=version)
        return None

    async def _store(self, context: ActionContext) -> Outcome:
        job = context.job
        payer = Payer(job.namespace)
        try:
            template = await context.turns.run(payer, resolve_template, job)
            async with self._gate:
                record = encode_record(await read_record(context.cluster, job, context.observation, template.nproc))
            child = await context.turns.run(payer, build_history_job, job, record, self._image)
        except InvalidManifest as error:
            return refuse_invalid(error)
        return await context.create_job(child, template)
