"""Training: setup, ranks, the training loop, logs, checkpoints and exports of a run."""
