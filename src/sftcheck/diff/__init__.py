"""Explains why two records differ, with numpy and the standard library alone.

two records  ->  matching.py   the same conversations and tokens in both
             ->  parts.py      the difference of the losses as a sum of parts, one for each factor
             ->  causes.py     what each part is: counts, sentences, a fault of faults.py
             ->  updates.py    what the optimizer makes of the gradients
             ->  difference.py the whole of it, as text and as JSON
"""
