"""The version, alone in a file that hatch reads without importing the package."""

__version__ = "0.1.0"
