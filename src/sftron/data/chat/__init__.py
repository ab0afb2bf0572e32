"""How a conversation becomes tokens."""
