"""Keys and values that the configuration no longer has, and what to write instead."""

REMOVED: dict[str, str] = {
    "logging.ledger": "each step's digest is always in metrics.jsonl, and `sftron audit` reads it",
    "model.loss=cce": "write native, or liger with the package liger-kernel",
}
"""By `section.key`, or by `section.key=value`: the sentence after "was removed". A row is read once its key has
left the schema, and may be written before."""
