"""Request to package: decides in Python, prints through templates. See README.md for the reading order."""

__version__ = "0.1.0"
