"""Code that tests share; tests/README.md describes the stand-ins."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The root of the repository."""
