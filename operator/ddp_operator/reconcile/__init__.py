"""One idempotent, level-triggered pass: observe, decide, execute, and at most one write of the status."""

from ddp_operator.reconcile.reconciler import Reconciler

__all__ = ["Reconciler"]
