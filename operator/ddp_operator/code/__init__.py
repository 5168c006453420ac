"""The user's folder as one archive: which files travel, how they are packed, and the commit that they are of."""
