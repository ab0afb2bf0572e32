"""Lanes: virtual shards of the data, with which pack n is the same for any number of ranks and workers."""
