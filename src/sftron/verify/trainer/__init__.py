"""Checks of a trainer of another library on its own batches, model and loss; verify_trainer.py has their table.

trainer -> subject.py        its batches (batches.py) and its model (model.py), left as they were (state.py)
        -> view.py           the documents in the batches (documents.py), each with what it should be (truth.py),
                             which may be read back from the ids (turn_text.py)
        -> *_checks.py       findings, with ../faults.py
        -> Report
"""
