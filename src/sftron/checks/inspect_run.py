"""`inspect`: a run's data as training will see it, and an audit of its rows. Needs no weights."""

from __future__ import annotations

from itertools import islice

from sftron.config import Config
from sftron.data.chat.check import MaskCount
from sftron.data.prepare import Preparation
from sftron.report.audit import Audit, audited_rows
from sftron.report.counts import PackingCount
from sftron.report.page import Inspection, inspect_packs
from sftron.train import build_data
from sftron.train.extension import given_rows
from sftron.train.places import pin_revisions


def open_data(config: Config) -> Preparation:
    """Opens the data and the tokenizer of a run. Raises ValueError if it cannot use one of them."""
    config = pin_revisions(config)
    return build_data.open_data(
        config, build_data.load_chat_tokenizer(config), given_rows(config.extend, config.model.path)
    )


def inspect(
    config: Config,
    *,
    num_shown: int = 1,
    num_packs: int = 100,
    num_rows: int | None = 10_000,
    preparation: Preparation | None = None,
) -> Inspection:
    """Returns the first packs of a run with an audit of its rows, as `sftron inspect` shows them.

    Args:
        num_shown: Number of packs in the result.
        num_packs: Number of packs that are counted.
        num_rows: Number of rows that are audited; None for all.
        preparation: The opened data of the run, by default from `open_data`.

    Raises:
        ValueError: The data, the tokenizer or a row cannot be used; DataError, if it is a row.
    """
    preparation = preparation or open_data(config)
    dataset, masks = build_data.make_dataset(config, preparation), MaskCount()
    num_held_out = sum(len(each.held_out) for each in preparation.datasets if each.held_out is not None)
    documents = {each.name: numbers for each in preparation.datasets if (numbers := each.documents)}
    packing = PackingCount(config.tokens.sequence_length, dataset.pool_delay)
    audit = Audit(preparation.source_names, preparation.targets, packing, masks, num_held_out, preparation.location)
    audit.documents = documents
    return inspect_packs(
        islice(dataset, max(num_shown, num_packs)),
        audited_rows(preparation, masks),
        preparation.chat_tokenizer.decode,
        audit=audit,
        max_rows=num_rows,
        num_shown=num_shown,
        title=f"{config.general.run_name}: what is trained",
    )
