"""The process that holds a pod of `ddp dev` between its runs."""
