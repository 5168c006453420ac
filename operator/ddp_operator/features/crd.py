"""``python -m ddp_operator.features.crd`` prints the definition of the job, or that of a kind of profile."""

import sys

from ddp_operator.api.constants import KIND
from ddp_operator.api.crd import build_crd, build_profile_crd, render_crd
from ddp_operator.features import SCHEMA

if __name__ == "__main__":
    kind = sys.argv[1] if len(sys.argv) > 1 else KIND
    sys.stdout.write(render_crd(build_crd(SCHEMA) if kind == KIND else build_profile_crd(kind, SCHEMA)))
