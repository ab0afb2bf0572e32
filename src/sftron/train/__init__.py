"""The run: devices and ranks, optimizer, metrics, trainer."""
