"""The commands of `sftron`: each module is one of them, and its `main` returns the exit status."""
