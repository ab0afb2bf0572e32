"""Remedies for what goes wrong between ranks: what it means, and what mends it."""

from __future__ import annotations

from sftron.verify.trainer.remedies import Remedy

ROWS = Remedy(
    "Rows are trained several times, or never.",
    "Give every rank the whole data set and the same seed: accelerate's dataloader shards it, ranks that share rows "
    "get the same ones, and a sampler or a shard of your own does it a second time.",
)
DENOMINATOR = Remedy(
    "The weight of a token depends on the number of ranks, or on its neighbors.",
    "Keep average_tokens_across_devices=True, and do not override get_batch_samples or _get_num_items_in_batch; a "
    "count of your own is summed over all ranks with different rows, once, and is not divided in whole numbers.",
)
MEAN_OF_RANKS = Remedy(
    "The step is a mean of the ranks' own means, or is divided by another number than that of all labels.",
    "Divide the sum of a rank's token losses by the labels of all ranks, times the number of ranks whose gradients "
    "are averaged, as transformers' compute_loss does.",
)
FACTOR = Remedy(
    "The gradient has a factor, as a learning rate or a clipping of the norm that is wrong by it has.",
    "Multiply the loss by the number of ranks exactly where their gradients are averaged (DDP and FSDP average), and "
    "divide by it once.",
)
NOT_SUMMED = Remedy(
    "The ranks do not add up their gradients, so their weights drift apart.",
    "Wrap the model in DDP or FSDP over all ranks, those that share rows too, and do not call no_sync in the last "
    "micro-batch.",
)
OTHER_GRADIENTS = Remedy(
    "The ranks together train on something else than one process does.",
    "The rows above and below say what differs: rows, denominators, rotations, borders, across ranks. If none fails, "
    "look for attention or recurrent layers that see only a part of the row.",
)
NOT_FINITE = Remedy(
    "A rank without a label divides by zero, or its weights are not finite.",
    "Divide by the labels of all ranks.",
)
ROTATIONS = Remedy(
    "Tokens of a part are rotated otherwise than in the whole row.",
    "Compute positions and rotations of the whole row and cut them afterwards; longrope and dynamic scaling choose by "
    "the length that they see.",
)
BORDERS = Remedy(
    "Labels are lost or doubled where a row is cut.",
    "Shift the labels of the whole row (shift_labels), and cut them afterwards; pad a row whose length the number of "
    "ranks does not divide.",
)
ACROSS = Remedy(
    "Conversations see each other across ranks.",
    "Pass the borders of the whole row (positions, cu_seqlens) to attention and recurrent layers, not those of a part.",
)
NOT_ALIKE = Remedy(
    "The ranks train different models, of which one is saved.",
    "Create new tensors (adapters, resized embeddings) with the same seed on all ranks, or broadcast them from rank 0.",
)
DRIFT = Remedy(
    "The ranks' copies drift apart, and one of them is saved.",
    "Give every rank the sum of all gradients, and the same optimizer; see gradients.",
)
