"""What tests use and what is no test itself; tests/README.md says what stands for what."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""
