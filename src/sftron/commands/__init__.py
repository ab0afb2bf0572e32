"""The commands of `sftron`: one module per command, whose `main` returns the exit status."""
