"""The values that the operator's settings give to jobs that set none."""

from collections.abc import Mapping
from typing import Any

import msgspec

from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.schema import Schema
from ddp_operator.api.status import Profile
from ddp_operator.api.written import parse_written, unknown_member
from ddp_operator.features.profiles.values import read_profile
from ddp_operator.manifests.template import check_owned_fields

JOB_DEFAULTS = "JobDefaults"
"""Kind in status.profile of a job without a profile: the defaults of the operator's settings."""


def read_job_defaults(settings: Mapping[str, Any], schema: Schema) -> Profile | None:
    """Return the operator's defaults for jobs as a profile, from part of a spec. None: there are no defaults.

    Raises: InvalidManifest.
    """
    names = ("securityProfile", *schema.with_defaults)
    errors = [unknown_member(name, "", names) for name in settings if name not in names]
    written = {name: value for name, value in settings.items() if value != {}}  # the chart has {} for an unset one
    job = parse_written({"metadata": {}, "spec": {"template": {"spec": {}}, **written}}, schema)
    errors += check_owned_fields(job, {}, {})
    if errors:
        raise InvalidManifest(errors)

    stored = msgspec.json.decode(msgspec.json.encode(job.spec))  # with lists, as an API server returns them
    values = {name: value for name, value in stored.items() if name in names and value}
    if not values:
        return None
    return read_profile({"kind": JOB_DEFAULTS, "metadata": {"name": ""}, "spec": {"job": values}})
