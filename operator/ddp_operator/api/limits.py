"""The fixed limits that can end a job, or an attempt of it; the others are fields of the spec. docs/api.md has all."""

from typing import Final

CRASH_LOOP_FAILURES: Final = 3
IN_PLACE_RESTARTS: Final = 2
"""Where spec.recovery.inPlaceRestarts is unset and the rendezvous allows them."""
SILENT_POD_SECONDS: Final = 60
"""A pod that runs may be on a lost node. Kubernetes finds that out after 50 seconds (40 before 1.32), and a kubelet
that lives has reported by then too; the next attempt could not begin before the end of that pod anyway."""
SILENT_START_SECONDS: Final = 15
"""Secondary failures are often reported first: the pod that caused them still writes its traceback."""
