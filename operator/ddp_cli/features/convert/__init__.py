"""`ddp convert`: the YAML of other operators becomes that of a job."""
