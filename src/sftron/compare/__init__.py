"""Comparisons of runs, and the grids that make them."""
