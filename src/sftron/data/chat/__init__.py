"""The tokenization of conversations with a chat template, with the role of every token."""
