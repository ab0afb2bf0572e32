"""What a run prints before and after its steps, and the first configuration for a user's own data."""
