"""A program without sftron that shows a fault of a trainer, as small as it can be made.

quoting.py   a value        -> its literal; and the check that a program has no code but sftron's and the user's
rebuild.py   a live trainer -> the parts of a Program, as source text (source.py), and the rows of its batches (seen.py)
evidence.py  a failed row   -> the lines that measure its fault with transformers and torch alone
program.py   Program        -> its text, and what it prints and exits with
search.py    a failed row   -> the smallest Program that still shows the fault
"""
