"""The reconcile pass, idempotent and level-triggered: observe, decide, execute, write the status at most once."""

from ddp_operator.reconcile.reconciler import Reconciler

__all__ = ["Reconciler"]
