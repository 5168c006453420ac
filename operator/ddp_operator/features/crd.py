"""``python -m ddp_operator.features.crd`` prints the definition of the job, or that of another kind."""

import sys

from ddp_operator.api.constants import KIND
from ddp_operator.api.crd import render_crd
from ddp_operator.features import build_definitions

if __name__ == "__main__":
    kind = sys.argv[1] if len(sys.argv) > 1 else KIND
    sys.stdout.write(render_crd(build_definitions()[kind]))
