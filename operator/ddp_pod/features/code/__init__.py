"""``spec.code``: the archive with the program."""
