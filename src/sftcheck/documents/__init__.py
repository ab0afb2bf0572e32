"""The documents in batches: found, read back from ids (turn_text.py), and what they should be (truth.py)."""
