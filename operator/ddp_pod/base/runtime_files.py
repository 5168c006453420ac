"""Files of the pod's runtime directory, through which its processes exchange records, and limits of them."""

from typing import Final

STOPPING_FILE: Final = "stopping"  # exists after the pod has received a stop signal
RUN_STEP_FILE: Final = "step.json"  # the run's step in pod 0, which its agent shares with peer pods
COUNTERS_FILE: Final = "counters"  # the ranks' counters of optimizer steps: memory that the launcher reads
STEP_HINT_FILE: Final = "step-hint.json"  # what makes the steps of rank 0 visible: {"hint": …}
CHILD_ERROR: Final = "error"  # the suffix of the file with the exception that ended a process of a rank's program
ENDING: Final = "ending"  # the suffix of the file with what keeps a rank's process alive after its program
FINISHED: Final = "finished"  # the suffix of the file with the process id of a rank that has run its exit handlers
OWN_END: Final = "own-end"  # the suffix of the file with the calls by which a rank's script ends its process
SHELL_END: Final = "shell-end"  # the suffix of the file with the command at which a rank's bash script ended
MAPPINGS: Final = "maps"  # the suffix of the file with the data files that a rank maps
STACK_LIMIT: Final = 64 * 1024  # characters kept of a worker's stacks
