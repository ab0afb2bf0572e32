"""Checks of a training loop that is nobody's Trainer; verify_step.py has their table.

step, model, batches -> model.py     the step is run with hooks on the model (call.py: the arguments of a call)
                     -> reading.py   what is trained, read from the gradient of the loss at the logits
                     -> subject.py   micro-batches as the checks of verify/trainer/ see them (batches.py)
                     -> step_checks.py, and the checks of verify/trainer/
"""
