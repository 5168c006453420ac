"""Code that tests share; tests/README.md describes the stand-ins."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The root of the repository."""

PATIENCE = 480.0
"""Seconds after which an expected event counts as missing. No test measures time with it. It is shorter than pytest's
limit for a test, so that the error names the event, and long enough for a machine with much other work."""
