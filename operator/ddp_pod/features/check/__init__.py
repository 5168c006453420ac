"""`ddp check`: a record of what each rank does."""
