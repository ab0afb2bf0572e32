"""Sweeps over configurations, run one after another, and comparisons of runs."""
