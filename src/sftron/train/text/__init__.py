"""What a run prints before and after its steps, and the first configuration for one's own data."""
