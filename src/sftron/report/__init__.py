"""What a person reads: packs in colour and the audit of a data set."""
