"""What a person reads: packs in color and the audit of a data set."""
