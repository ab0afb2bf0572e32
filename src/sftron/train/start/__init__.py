"""The start of a run: its data and model from the configuration, checked and described before the first step."""
