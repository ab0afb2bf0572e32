"""The formats of rows, declared or detected, and their strict parsers."""
