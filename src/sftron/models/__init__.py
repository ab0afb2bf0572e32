"""The decoder model `LlamaForSFT` and its parts; they take tensors and depend on neither data nor configuration."""
