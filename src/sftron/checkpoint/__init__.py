"""Loading and saving of weights: Hugging Face folders, and the checkpoints of a run."""
