"""Verification of a model against transformers, of a configured run before it begins, and of a finished run by its
ledger."""
