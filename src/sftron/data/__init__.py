"""The data pipeline, from the rows of a file to packed batches of torch tensors on the CPU."""
