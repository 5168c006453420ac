"""`ddp drill`: kill a rank of a running job, and measure its recovery."""
