"""Profiles of hypothesis: the same examples every time, or new ones with HYPOTHESIS_PROFILE=explore; few, so quick."""

import os

from hypothesis import HealthCheck, settings

COMMON = {
    "deadline": None,  # other work on the machine makes single examples slow
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
    "max_examples": int(os.environ.get("HYPOTHESIS_EXAMPLES", "60")),
    "database": None,
}
settings.register_profile("same", derandomize=True, **COMMON)
settings.register_profile("explore", **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
