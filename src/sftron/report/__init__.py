"""Reports for people: colored packs and data audits, on a terminal and as HTML pages."""
