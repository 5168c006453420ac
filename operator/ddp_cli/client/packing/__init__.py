"""Pack the user's folder into one archive: select its files, compress them, and read their commit."""
