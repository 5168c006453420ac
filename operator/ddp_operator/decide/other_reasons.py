"""Reasons of conditions by which the kernel decides nothing: of features, and of `ddp run`."""

from typing import Final

# InputsReady, of a feature that prepares the job: also the reasons of Scheduled, of the pod that fetches
FETCHING_INPUTS: Final = "FetchingInputs"
UNREACHABLE: Final = "Unreachable"
# Scheduled: all pods are
CHANGE_PENDING: Final = "ChangePending"
SIDECAR_RESTARTED: Final = "SidecarRestarted"
# Progressing; those of nodes of Rendezvoused too
STALLED: Final = "Stalled"
NODE_NOT_READY: Final = "NodeNotReady"
NODE_SILENT: Final = "NodeSilent"
# Failed: of `ddp run` alone
OPERATOR_ERROR: Final = "OperatorError"
"""An operator in a cluster retries for ever."""
INTERRUPTED: Final = "Interrupted"
"""By Ctrl-C or a signal."""
