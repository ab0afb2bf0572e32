"""LlamaForSFT: takes tensors, sees neither data nor configuration."""
