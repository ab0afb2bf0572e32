"""Exports of a run: whole models and adapters, their cards, and pushes to the Hub."""
