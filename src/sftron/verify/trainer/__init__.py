"""Checks of a trainer of another library on its own batches, model and loss; verify_trainer.py has their table."""
