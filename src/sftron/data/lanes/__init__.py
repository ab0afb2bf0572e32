"""Lanes: virtual shards of the data, so that pack n is the same for every number of ranks and workers."""
