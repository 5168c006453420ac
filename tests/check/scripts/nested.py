"""Start a launcher in each rank: every launcher has a group of its own."""

import subprocess
import sys

command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "mlp.py"]
sys.exit(subprocess.run(command, check=False).returncode)  # fault
