"""The configuration of a run: settings and their flags, how they are put together, and the presets."""
