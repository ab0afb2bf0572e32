"""The checks of a trainer on several ranks: on each of them, and between them (on_ranks.py)."""
