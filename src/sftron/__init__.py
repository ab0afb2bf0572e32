"""Supervised fine-tuning that you can verify."""

__version__ = "0.1.0"
