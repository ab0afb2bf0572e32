"""LlamaForSFT: takes tensors, sees no data and no configuration."""
