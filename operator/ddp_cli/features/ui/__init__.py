"""`ddp ui` and `ddp report`: pages about jobs and runs, live in the browser or saved as one file."""
