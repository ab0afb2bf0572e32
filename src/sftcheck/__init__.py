"""Checks anybody's trainer, training loop or model before it trains; it runs where torch and transformers run.

trainer/, loop/, ranks/  ->  subject.py    what a trainer, a loop or several ranks are to the checks
                           ->  documents/    the conversations in their batches: found, read back, compared
                           ->  checks/       findings, each with a fault of faults.py
                           ->  program/      a program without sftron that shows the fault
"""
