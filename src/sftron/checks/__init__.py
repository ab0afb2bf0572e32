"""Checks of a model against transformers, of a run before it begins, and of a run that has ended."""
