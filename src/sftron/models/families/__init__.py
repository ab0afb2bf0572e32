"""The model families, as data."""
