"""The rows of the report, by what they look at: data, labels, the model, and what is saved."""
