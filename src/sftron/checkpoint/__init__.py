"""Weights in and out: Hugging Face folders, and the checkpoints of a run."""
