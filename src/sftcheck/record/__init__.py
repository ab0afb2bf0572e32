"""Records what a trainer's first steps train, token by token, for `sftron diff`.

a trainer, a loop  ->  passes.py      what each token weighs in the loss, its log-probability in the trainer's own call
                   ->  reference.py   the same by the reference, beside its neighbors and alone
                   ->  recorder.py    one file
"""
