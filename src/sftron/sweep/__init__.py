"""Several runs, compared: sweeps without a server, plots of any runs, and what a setting changed."""
