"""A trainer of another library as the subject of checks: its own batches, model, loss and schedule.

trainer -> recording.py         what its collator makes of which rows
        -> called_model.py      its model, called as its own step calls it
        -> trainer_subject.py   both, with the documents of the batches; restore.py leaves the trainer as it was
"""
