"""Laws 5 and 6 on the user's own data: which pack comes when, whatever the toggles, the ranks and the stops."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np

from sftron.data.dataloader import PackLoader
from sftron.data.types import Batch, Pack
from sftron.train import feed
from sftron.verify.run_check import Finding
from sftron.verify.run_subject import Subject

_NUM_PACKS, _STOPS = 6, (1, 4)


def check_toggles(subject: Subject) -> Finding:
    """The packs of the run against those under each other setting of the two toggles."""
    ours = subject.packs[:_NUM_PACKS]
    data = subject.config.data
    wrong = []
    for completions, isolated in ((True, True), (True, False), (False, True), (False, False)):
        toggles = {"train_on_completions_only": completions, "remove_cross_attention": isolated}
        config = subject.config.model_copy(update={"data": data.model_copy(update=toggles)})
        preparation = feed.prepare(config, subject.chat_tokenizer)
        dataset = feed.make_dataset(config, preparation, row_lengths=subject.row_lengths)
        theirs = islice(dataset, len(ours))
        wrong += [
            f"pack {a.index} differs with {toggles}" for a, b in zip(ours, theirs, strict=True) if not _same(a, b)
        ]
    return Finding(
        not wrong,
        f"{len(ours)} packs under 4 settings: {len(wrong) or 'none'} differ",
        "none",
        tuple(wrong[:5]),
    )


def _same(a: Pack, b: Pack) -> bool:
    """What the toggles must leave alone."""
    fields = ("input_ids", "role_ids", "conversation_bounds")
    return a.keys == b.keys and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in fields)


def check_order(subject: Subject) -> Finding:
    """The order of the data after a save and a load, and dealt to two ranks, against that of one run without a stop."""
    expected = list(islice(_loader(subject), _NUM_PACKS))
    wrong = []
    for num_before in _STOPS:
        loader = _loader(subject)
        for _ in islice(loader, num_before):
            pass
        saved = json.dumps(loader.state_dict())
        resumed = _loader(subject)
        resumed.load_state_dict(json.loads(saved))
        after = islice(resumed, _NUM_PACKS - num_before)
        wrong += [
            f"stopped after {num_before}: pack {a.pack.index} is another one"
            for a, b in zip(expected[num_before:], after, strict=True)
            if not _same_batch(a, b)
        ]
    ranks = "not dealt to two ranks: data.num_lanes is odd"
    dataset = feed.make_dataset(subject.config, subject.preparation)
    if dataset.is_planned or dataset.num_lanes % 2 == 0:
        dealt = [islice(_loader(subject, rank), _NUM_PACKS // 2) for rank in range(2)]
        of_two = [batch for pair in zip(*dealt, strict=True) for batch in pair]
        wrong += [
            f"dealt to 2 ranks: pack {a.pack.index} is another one"
            for a, b in zip(expected, of_two, strict=True)
            if not _same_batch(a, b)
        ]
        ranks = "dealt to 2 ranks, which take them in turn"
    return Finding(
        not wrong,
        f"{_NUM_PACKS} packs, stopped after {' and '.join(map(str, _STOPS))}: {len(wrong) or 'none'} differ",
        "none, to the bit",
        (*wrong[:5], ranks, f"the data's whole state is {len(saved):,} bytes"),
    )


def _loader(subject: Subject, rank: int | None = None) -> PackLoader:
    options = {} if rank is None else {"dp_rank": rank, "dp_world_size": 2}
    preparation = feed.prepare(subject.config, subject.chat_tokenizer)
    config = subject.config.model_copy(update={"data": subject.config.data.model_copy(update={"num_workers": 0})})
    dataset = feed.make_dataset(config, preparation, row_lengths=subject.row_lengths, **options)
    return feed.make_loader(config, dataset, keep_tail=True, pin_memory=False)


def _same_batch(a: Batch, b: Batch) -> bool:
    names = ("input_ids", "position_ids", "cu_seqlens", "labeled_rows", "labels", "loss_weights")
    return a.pack.keys == b.pack.keys and all(getattr(a, name).equal(getattr(b, name)) for name in names)
