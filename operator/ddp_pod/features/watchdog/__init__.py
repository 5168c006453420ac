"""What the launcher watches of its ranks: hangs and their stacks, process groups, and the files that they map."""
