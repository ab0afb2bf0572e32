"""Conversations to packs: everything that happens to text before it is a tensor on a device."""
