"""A training loop without a `Trainer` as the subject of checks; verify_step.py has their table.

step, model, batches -> loop_model.py     the step is run with hooks on the model (call.py: the arguments of a call)
                     -> reading.py   what is trained, read from the gradient of the loss at the logits
                     -> loop_subject.py   micro-batches as the checks see them (loop_batches.py)
                     -> step_checks.py, and checks/
"""
