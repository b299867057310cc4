"""The one place where the version stands (pyproject.toml reads it)."""

__version__ = "0.1.0"
