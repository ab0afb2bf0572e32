"""How far each measured value may be from the expected one, and why: the tolerances of all checks.

A tolerance of two values depends on the type in which the model computes: rounding in bfloat16 is about 2**-8.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A limit in float32, and the limit in any other type."""

    in_float32: float
    in_others: float

    def limit_of(self, model: object) -> float:
        """Returns the limit of a model, which says with `is_rounded` whether it computes in another type."""
        return self.in_others if getattr(model, "is_rounded", False) else self.in_float32


# -- loss --------------------------------------------------------------------------------------------------------------

LOSS = Tolerance(1e-4, 2**-6)
"""Relative, of a step's loss from the ratio. Both are sums of the same losses, in another order."""
MICRO_BATCH_WEIGHT = 0.01
"""Relative, of the weight of one micro-batch; a mean of means is off by more, as the counts differ by UNLIKE."""
OTHER_LOSS = 1e-3
"""Relative, of rows one by one from the same rows together, by a loss that is no cross-entropy."""
UNLIKE = 0.1
"""Relative, the least difference of two counts of labels that shows a mean of means."""
WITHOUT_GRADIENT = 0.1
"""The largest share of labels without a gradient: a token that is predicted with certainty has none."""
EVALUATED_GAP = 1e-5
"""Relative, the least difference of a mean of means from the ratio that eval_loss, in float32, can show."""
SHARE_OF_GAP = 0.25
"""The share of that gap that is rounding."""
TOKEN_WEIGHT = 0.01
"""Relative, of the weight of a loop's token, which is rounded in the type of the logits."""
LIKE_CROSS_ENTROPY = 0.1
"""The largest relative deviation of a gradient from a softmax; a tanh that bounds the logits has less."""

# -- gradients ---------------------------------------------------------------------------------------------------------

GRADIENT = Tolerance(1e-3, 2**-4)
"""Relative, of a tensor's gradient from the gradient of the trainer's loss; both run the same kernels."""
GRADIENT_OF_RANKS = Tolerance(1e-3, 2**-5)
"""Relative, of a tensor's gradient after the reduction from the gradient in one process; a reduction rounds once."""
SMALL_TENSOR = Tolerance(1e-4, 2**-7)
"""The share of the whole norm with which a smaller tensor is compared, as all of it may be rounding."""
FACTOR = 0.01
"""Relative, of a factor from the number of ranks that explains it."""
LOST_GRADIENT = 0.05
"""Relative, of a loop's gradient from the sum of its micro-batches, whose direction clipping does not change."""

# -- hidden states -----------------------------------------------------------------------------------------------------

ALONE = Tolerance(5e-4, 2**-4)
"""Relative, of the hidden states of a conversation in its batch from those alone; other shapes take other kernels."""
ROTATION = Tolerance(1e-3, 2**-6)
"""Of a cosine or sine in a part of a row; another position changes the fastest ones by more."""
CHANGE_ACROSS_RANKS = Tolerance(1e-5, 2**-7)
"""Relative to the largest hidden state, of one that should not change; the same kernels give nearly the same bits."""
UNKNOWN_ROUNDING = Tolerance(1e-5, 2**-8)
"""The rounding of a model that takes no copies beside each other, so that it cannot be measured."""
PADDING_ROUNDINGS = 4
"""By how many measured roundings other tokens in the padding may change a text, whose sums have more terms then."""

# -- others ------------------------------------------------------------------------------------------------------------

KNOWN_DOCUMENTS = 0.95
"""The smallest share of documents that must be recovered; a few rows of any data set are odd."""
UNTRAINED_ROW = 0.1
"""The share of the median of all rows below which the norm of an embedding, or its distance from the mean, is new."""
SAME_RATE = 1e-9
"""Relative, of two learning rates; some schedules compute a rate from the one before."""
