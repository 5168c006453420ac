"""`ddp report`: the page of a run, one HTML file without external resources and scripts."""
