"""Several runs: the grid of a sweep file, one run after another, and runs compared."""
