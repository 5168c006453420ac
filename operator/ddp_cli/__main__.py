"""The command `ddp`, also as ``python -m ddp_cli``: the commands of the kernel with those of the features."""

import sys
from collections.abc import Sequence

try:
    from ddp_cli import commands
    from ddp_cli.client.hooks import use_features
    from ddp_cli.features import FEATURES
except KeyboardInterrupt:  # Ctrl-C before any command has begun
    sys.exit(130)

COMMANDS = commands.place_commands(FEATURES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code (``commands.io.ExitCode``)."""
    use_features(FEATURES)
    return commands.main(COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
