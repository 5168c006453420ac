"""The configuration of a run: settings, their flags, and the presets."""
