"""The start-up sample: a few hundred rows, checked in full; and the projection of the run from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sftron.config import Config
from sftron.data.chat.check import MaskCount, require_reference_ids
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.dataset import PackedDataset
from sftron.data.labels import DEFAULT_TRAINED_ROLES, Targets
from sftron.data.prepare import Preparation
from sftron.data.types import (
    Conversation,
    ConversationKey,
    DataError,
    Document,
    Dropped,
    LabeledConversation,
    Message,
    Role,
    TokenizedConversation,
)
from sftron.report.audit import Audit, AuditedRow
from sftron.report.counts import SourceCount
from sftron.train.progress import Progress, too_many_dropped
from sftron.visible_text import counted

_NUM_SAMPLED_ROWS, _FEWEST_SAMPLED_ROWS = 400, 50
_MOST_TOKENS_COMPARED = 1_000_000
"""The tokens of the conversations whose masks are compared, each conversation's times its answers, as each is tokenized
up to each of its answers. They take about two seconds on one core."""
_MOST_EPOCHS = 4
"""The number of epochs up to which repeated data is nearly as good as new data (Muennighoff et al., arXiv
2305.16264)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The sampled rows and the statistics over them."""

    rows: tuple[AuditedRow, ...]
    audit: Audit
    num_pretokenized: int
    """The number of kept rows that are pretokenized."""
    num_documents: int
    """The number of kept rows that are plain text, whose ids equal those of `tokenizer(text)`."""
    num_equal: int
    """The number of kept conversations whose ids equal those of apply_chat_template; the others spell control tokens in
    their text."""
    stop_ids: tuple[int, ...]
    """The control tokens that end assistant turns or trained spans of pretokenized rows, most frequent first."""
    control_ids: frozenset[int]
    """The control tokens that occur in the rows; the template writes them."""
    masks: MaskCount
    """The comparison of as many masks of the rows as take about two seconds."""
    other_prompt: tuple[str, str] | None
    """The end of the assistant header in training and the end of the generation prompt; None if they are equal."""

    @property
    def counts(self) -> list[SourceCount]:
        """The counts of each data set, in the order of data.datasets."""
        return [count for _, count in sorted(self.audit.sources.items())]


def check_sample(preparation: Preparation, max_dropped_share: float) -> Sample:
    """Prepares a few hundred evenly spaced rows, audits them, and compares ids and masks with apply_chat_template.

    Raises DataError for a bad row, for ids or a mask that differs, for a problem that the audit finds, and if more than
    `max_dropped_share` of the rows are dropped.
    """
    chat_tokenizer = preparation.chat_tokenizer
    rows: list[AuditedRow] = []
    chats: list[_Chat] = []
    audit = Audit(preparation.source_names, preparation.targets, locate=preparation.location)
    stops: Counter[int] = Counter()
    control_ids: set[int] = set()
    num_pretokenized = num_documents = num_equal = 0
    for key in sampled_keys(preparation):
        tokenized = preparation.tokenize(key)
        if isinstance(tokenized, Dropped):
            rows.append(tokenized)
        else:
            labeled = preparation.label(tokenized)
            control_ids |= set(tokenized.input_ids.tolist()) & chat_tokenizer.control_ids
            parsed = preparation.parse(key)
            if isinstance(parsed, Conversation):
                if not tokenized.num_truncated_turns:
                    require_reference_ids(chat_tokenizer, parsed, tokenized)
                    chats.append((parsed, tokenized, labeled))
                num_equal += not tokenized.holds_control_text
                stops.update(tokenized.stop_ids)
            elif isinstance(parsed, Document):
                require_reference_ids(chat_tokenizer, parsed, tokenized)
                num_documents += 1
            else:
                num_pretokenized += 1
                stops.update(_stops_of_pretokenized(tokenized, chat_tokenizer.control_ids))
            rows.append((tokenized, labeled))
        audit.add_row(rows[-1])
    masks = _compare_masks(preparation, chats)
    if problems := [*audit.problems, *masks.mistakes, *_problems_of_drops(preparation, audit, max_dropped_share)]:
        drops = [f"{count} {reason}; the first: {first}" for reason, count, first in audit.drops()]
        raise DataError("\n".join([f"{len(rows)} rows were sampled:", *problems, *drops]))
    return Sample(
        rows=tuple(rows),
        audit=audit,
        num_pretokenized=num_pretokenized,
        num_documents=num_documents,
        num_equal=num_equal,
        stop_ids=tuple(token_id for token_id, _ in stops.most_common()),
        control_ids=frozenset(control_ids),
        masks=masks,
        other_prompt=_other_prompt(chat_tokenizer),
    )


_Chat = tuple[Conversation, TokenizedConversation, LabeledConversation]


def _compare_masks(preparation: Preparation, chats: Sequence[_Chat]) -> MaskCount:
    """Compares the masks of all conversations, or of as many random ones as _MOST_TOKENS_COMPARED allows."""

    def cost(chat: _Chat) -> int:
        return len(chat[1]) * sum(message.role is Role.ASSISTANT for message in chat[0].messages)

    masks, num_left = MaskCount(), max(_MOST_TOKENS_COMPARED, min(map(cost, chats), default=0))
    for number in np.random.default_rng(0).permutation(len(chats)):
        conversation, tokenized, labeled = chat = chats[number]
        if cost(chat) <= num_left:
            num_left -= cost(chat)
            chat_tokenizer = preparation.chat_tokenizer
            eos_id: Any = chat_tokenizer.tokenizer.eos_token_id
            stop_ids = {eos_id, *tokenized.stop_ids}
            masks.add(chat_tokenizer, preparation.trained, conversation, tokenized, labeled, stop_ids)
    return masks


def sampled_keys(preparation: Preparation, num_rows: int = _NUM_SAMPLED_ROWS) -> Iterator[ConversationKey]:
    """Yields evenly spaced keys of each data set, in proportion to its rows, but at least 50.

    The keys of a stream are those of its first rows.
    """
    for index, dataset in enumerate(preparation.datasets):
        size = len(dataset.first_rows(num_rows))
        fewest = min(num_rows, _FEWEST_SAMPLED_ROWS)
        wanted = max(fewest, num_rows * size // max(size, preparation.num_rows or 0))
        for row in range(0, size, max(1, size // wanted)):
            yield ConversationKey(index, row)


def _problems_of_drops(preparation: Preparation, audit: Audit, max_dropped_share: float) -> Iterator[str]:
    """Yields a problem if too many rows of the run are dropped, or all rows of a data set that has a weight."""
    counts = [audit.sources[index] for index in range(len(preparation.datasets))]
    rates = [float(dataset.num_rows or 1) for dataset in preparation.datasets]
    if preparation.weights is not None:
        for dataset, count in zip(preparation.datasets, counts, strict=True):
            if not count.num_kept:
                yield f"None of {count.num_rows} rows of {dataset.name} was kept, so it cannot get its share."
                return
        rates = [w * count.num_rows / count.num_tokens for w, count in zip(preparation.weights, counts, strict=True)]
    dropped = sum(rate * count.dropped.total() / count.num_rows for rate, count in zip(rates, counts, strict=True))
    share = dropped / sum(rates)
    if share > max_dropped_share:
        yield too_many_dropped(round(share * audit.num_rows), audit.num_rows, max_dropped_share, audit.dropped)


def _stops_of_pretokenized(tokenized: TokenizedConversation, control_ids: Collection[int]) -> list[int]:
    """Returns the control tokens that end model-generated spans of a pretokenized row."""
    is_generated = np.isin(tokenized.role_ids, list(DEFAULT_TRAINED_ROLES))
    last_ids = tokenized.input_ids[is_generated & ~np.append(is_generated[1:], False)].tolist()
    return [token_id for token_id in last_ids if token_id in control_ids]


def _other_prompt(chat_tokenizer: ChatTokenizer) -> tuple[str, str] | None:
    """Returns the ends of the assistant header in training and of the generation prompt; None if they are equal."""
    messages = (Message(Role.USER, "Hi"), Message(Role.ASSISTANT, "Yo"))
    try:
        trained = chat_tokenizer.encode(Conversation(messages, ConversationKey(0, 0), "a probe"))
        prompt = chat_tokenizer.encode_prompt(messages[:1])
    except ValueError:
        return None  # some templates refuse so plain a conversation
    header = trained.input_ids[: int(np.flatnonzero(Targets().mask_of(trained))[0])].tolist()
    return None if prompt == header else (chat_tokenizer.decode(header[-8:]), chat_tokenizer.decode(prompt[-8:]))


# --- The projection ---


@dataclass(frozen=True, slots=True)
class DataSetProjection:
    """The estimates for one data set."""

    name: str
    share: float
    """The share of the run's tokens, by weight or by number of tokens."""
    mean_tokens: float
    """The mean number of tokens in a kept row."""
    trained_share: float
    """The share of its tokens that are trained."""
    tokens_per_epoch: int | None
    """The number of tokens in all its rows; None for a stream, whose length is not known."""
    epochs: float | None
    """The number of passes over its rows in the whole run; None for a stream."""


@dataclass(frozen=True, slots=True)
class RunProjection:
    """The estimates for the whole run."""

    datasets: tuple[DataSetProjection, ...]
    conversations_per_pack: float
    tokens_per_step: int
    steps_per_epoch: float | None
    """The steps per epoch; None if each data set has its own epochs, or if the length of the data is not known."""
    fill: float
    """The expected fill of packs; below 1 if the pool holds less than a pack."""

    @property
    def tokens_per_epoch(self) -> int:
        """The number of tokens in all rows of all data sets."""
        return sum(dataset.tokens_per_epoch or 0 for dataset in self.datasets)

    @property
    def trained_share(self) -> float:
        return sum(dataset.share * dataset.trained_share for dataset in self.datasets)

    def lines(self, config: Config, token_budget: int) -> Iterator[str]:
        """Yields the lines for the console."""
        steps, epochs, per_epoch = config.tokens.train_steps, config.tokens.train_epochs, self.steps_per_epoch
        trained = f"{self.trained_share:.0%}"
        if per_epoch is None:
            length = f"{counted(steps or 0, 'steps')}; {trained} of the tokens trained"
        else:
            of_epochs = counted(round((epochs or 0) * per_epoch), "steps")
            about = f"{steps / per_epoch:.2f} epochs" if steps else of_epochs
            length = (
                f"{counted(steps, 'steps') if steps else counted(epochs or 0, 'epochs')}, about {about}; an epoch is "
                f"about {per_epoch:,.1f} steps and {self.tokens_per_epoch:,} tokens, {trained} of them trained"
            )
        yield f"projection {length}; about {counted(self.tokens_per_step, 'tokens')} a step"
        sequence_length = config.tokens.sequence_length
        padded = self.conversations_per_pack * sequence_length / token_budget
        yield (
            f"           about {self.conversations_per_pack:,.1f} conversations a pack, which padded to "
            f"{sequence_length:,} would take {padded:.1f} times the positions"
        )
        known = [(each, each.epochs) for each in self.datasets if each.epochs is not None]
        for dataset, passes in known if per_epoch is None else ():
            yield f"           {dataset.name}: about {passes:.2f} epochs of {dataset.tokens_per_epoch:,} tokens"

    def warnings(self, config: Config) -> Iterator[str]:
        """Yields a warning for each data set that is repeated often, and for packs that are not full."""
        for dataset in self.datasets if config.tokens.train_epochs is None else ():
            if dataset.epochs is not None and dataset.epochs > _MOST_EPOCHS:
                is_alone = self.steps_per_epoch is not None
                remedy = "tokens.train_steps" if is_alone else "its weight, or tokens.train_steps"
                times = f"{dataset.name} is trained about {dataset.epochs:.1f} times"
                yield f"{times}; if that is not intended, lower {remedy}"
        if config.data.packing.strategy == "pool" and self.fill < 1:
            pool = f"a pool of {config.data.packing.pool_size} conversations"
            remedy = "raise data.packing.pool_size, or lower tokens.micro_batch_size"
            yield f"{pool} fills about {self.fill:.0%} of a pack: {remedy}"


def project(config: Config, dataset: PackedDataset, sample: Sample, *, dp_world_size: int) -> RunProjection:
    """Estimates the run from its sample of rows.

    With strategy `pool`, packs are assumed to be full if the pool holds enough, because it fills 99 % or more.
    """
    preparation, counts = dataset.preparation, sample.counts
    per_epoch = [
        None if each.num_rows is None else each.num_rows * count.num_tokens / count.num_rows
        for each, count in zip(preparation.datasets, counts, strict=True)
    ]
    known = [tokens for tokens in per_epoch if tokens is not None]
    # Without weights and with an unknown length, there is only one data set.
    parts = preparation.weights or known or (1,)
    shares = [part / sum(parts) for part in parts]
    means = [count.num_tokens / max(1, count.num_kept) for count in counts]
    conversations_per_token = sum(share / mean for share, mean in zip(shares, means, strict=True) if share)

    conversations_in_budget = dataset.token_budget * conversations_per_token
    of_pool = min(conversations_in_budget, config.data.packing.pool_size)
    of_strategy = {"pool": of_pool, "minibatch": config.tokens.micro_batch_size, "none": 1}
    conversations_per_pack = of_strategy[config.data.packing.strategy]
    packs_per_step = config.tokens.batch_accumulation_per_replica * dp_world_size
    tokens_per_step = packs_per_step * conversations_per_pack / conversations_per_token
    steps_per_epoch = None if preparation.weights or not known else sum(known) / tokens_per_step
    steps = config.tokens.train_steps or (config.tokens.train_epochs or 0) * (steps_per_epoch or 0)
    datasets = tuple(
        DataSetProjection(
            name=each.name,
            share=share,
            mean_tokens=mean,
            trained_share=count.num_trained_tokens / max(1, count.num_tokens),
            tokens_per_epoch=None if tokens is None else round(tokens),
            epochs=None if tokens is None else steps * tokens_per_step * share / max(1, tokens),
        )
        for each, count, share, mean, tokens in zip(preparation.datasets, counts, shares, means, per_epoch, strict=True)
    )
    fill = conversations_per_pack / conversations_in_budget
    return RunProjection(datasets, conversations_per_pack, round(tokens_per_step), steps_per_epoch, fill)


def mix_report(
    config: Config, preparation: Preparation, sample: Sample, projection: RunProjection, progress: Progress
) -> dict[str, Any]:
    """Returns the mix report, as JSON values: {"step", "tokens", "datasets": [{..., "sampled", "planned", "trained"}]}.

    `planned` is estimated from the sampled rows, and its epochs are those at the end of the run. `trained` has the
    counts so far; its `rows` include dropped rows.
    """
    tokens = sum(count.tokens for count in progress.datasets)  # those of the current data version
    plans, counts = zip(projection.datasets, sample.counts, strict=True), progress.datasets
    entries = zip(preparation.datasets, config.data.datasets, plans, counts, strict=True)
    datasets = [
        {
            "name": dataset.name,
            "path": options.path,
            "format": str(dataset.row_format),
            "rows": dataset.num_rows,
            **({"documents": documents} if (documents := dataset.documents) else {}),
            "weight": dataset.weight,
            "sampled": {
                "rows": sampled.num_rows,
                "kept": sampled.num_kept,
                "mean_tokens": plan.mean_tokens,
                "trained_share": plan.trained_share,
            },
            "planned": {"share": plan.share, "epochs": plan.epochs, "tokens_per_epoch": plan.tokens_per_epoch},
            "trained": {
                "rows": count.rows,
                "conversations": count.conversations,
                "tokens": count.tokens,
                "share": count.tokens / max(1, tokens),
                "trained_tokens": count.trained_tokens,
                "epochs": count.epochs(dataset.num_rows),
                "dropped": dict(count.dropped),
            },
        }
        for dataset, options, (plan, sampled), count in entries
    ]
    return {"step": progress.step, "tokens": progress.total.tokens, "datasets": datasets}
