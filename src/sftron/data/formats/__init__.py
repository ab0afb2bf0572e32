"""Rows to conversations: the formats of rows, detected or declared, read strictly."""
