"""Proofs against the reference implementation."""
