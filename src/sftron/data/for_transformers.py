"""Packs as batches for transformers' Trainer, in the form of its DataCollatorWithFlattening.

    one pack, of conversations a b c and d e    input_ids     a    b  c  d    e
    sftron's labels, shifted                    labels        b    c  -  e    -
    Hugging Face's, which the model shifts      labels        -    b  c  -    e
                                                position_ids  0    1  2  0    1
                                                cu_seq_lens   0 3 5

("-" is IGNORE_INDEX.) The first token of a conversation is not a label, because only the conversation before it could
predict it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from sftron.data.types import IGNORE_INDEX, DataError, Pack


@dataclass(frozen=True, slots=True, kw_only=True)
class FlattenPacks:
    """A data_collator for a PackedDataset: it joins several packs into one flat row, without their padding.

    The batches are bitwise equal to DataCollatorWithFlattening's with the same arguments:

    - `input_ids`, `labels`, `position_ids`: int64 [1, T];
    - with return_flash_attn_kwargs, `cu_seq_lens_q`, `cu_seq_lens_k`: int32 [documents + 1], and `max_length_q`,
      `max_length_k`: Python ints;
    - with return_seq_idx, `seq_idx`: int32 [1, T].

    Both arguments are true by default, unlike in DataCollatorWithFlattening. With these keys, attention and recurrent
    states can restart at each conversation. A model that cannot restart them refuses some of the keys, whereas with
    `position_ids` alone its training would be wrong without an error. A model that ignores all of the keys may still
    attend across conversations, which `sftron.check_isolation` measures.

    Raises:
        DataError: A pack has token weights other than 0 and 1, which these labels cannot express, or the data has
            ended.
    """

    return_flash_attn_kwargs: bool = True
    return_seq_idx: bool = True

    def __call__(self, packs: Sequence[Pack]) -> dict[str, Any]:
        packs = [pack for pack in packs if pack.keys]
        if not packs:
            raise DataError("the data has ended (num_epochs); lower max_steps, or raise num_epochs")
        # The documents that hold conversations.
        bounds = [np.unique(pack.cu_seqlens.clip(max=pack.num_tokens)) for pack in packs]
        lengths = np.concatenate([np.diff(each) for each in bounds]).tolist()
        batch: dict[str, Any] = {
            "input_ids": _flat([pack.input_ids[: pack.num_tokens] for pack in packs]),
            "labels": _flat([_unshifted_labels(pack) for pack in packs]),
            "position_ids": _flat([pack.position_ids[: pack.num_tokens] for pack in packs]),
        }
        if self.return_flash_attn_kwargs:
            cu_seq_lens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            batch |= {"cu_seq_lens_q": cu_seq_lens, "cu_seq_lens_k": cu_seq_lens}
            batch |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
        if self.return_seq_idx:
            numbers = torch.arange(len(lengths), dtype=torch.int32)
            batch["seq_idx"] = numbers.repeat_interleave(torch.tensor(lengths))[None]
        return batch


def _flat(rows: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(rows).astype(np.int64))[None]


def _unshifted_labels(pack: Pack) -> np.ndarray:
    if weights := set(pack.loss_weights.tolist()) - {0.0, 1.0}:
        raise DataError(
            f"pack {pack.index} has tokens of weight {min(weights):g}, but labels for transformers are only on or off; "
            "give messages the weight 0 or 1, or train with sftron's Trainer"
        )
    return np.append(np.int32(IGNORE_INDEX), pack.labels[: pack.num_tokens - 1])
