"""What each part of a difference is: how many tokens it concerns, what they are, and the fault that it may be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from sftcheck.diff.matching import Matching, Pair, own_prefixes, trains_itself
from sftcheck.diff.parts import Factor
from sftcheck.faults import Fault
from sftron.report.token_record import ROLE_NAMES, UNKNOWN_ROLE, TokenRecord
from sftron.visible_text import counted

_SAME_WEIGHT = 1e-4
_SAME_LOG_PROBABILITY = 1e-3
"""Of a token beside its neighbors and alone, in float32; other shapes take other kernels."""
_FROM_PROMPTS = (1, 2, 4)
_MODEL_WRITES = (3, 5, 6, 8)
_TEMPLATE = 0


@dataclass(frozen=True, slots=True)
class Cause:
    """What a factor is in both records.

    Attributes:
        count: How many tokens (conversations, for rows) differ; with 0, the records are equal in this factor.
        sentence: What differs.
        side: The record that has the fault, "A" or "B"; "" if there is none.
        values: What the places in the fault's texts stand for.
    """

    count: int
    sentence: str
    fault: Fault | None = None
    side: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


def causes(matching: Matching) -> dict[Factor, Cause]:
    """Returns the cause of each factor but the residual."""
    found = _Causes(matching)
    return {
        Factor.ROWS: found.rows(),
        Factor.IDS: found.ids(),
        Factor.TRAINED: found.trained(),
        Factor.WEIGHTS: found.weights(),
        Factor.CONTEXT: found.context(),
        Factor.MODEL: found.model(),
        Factor.RESIDUAL: found.residual(),
    }


class _Causes:
    def __init__(self, matching: Matching) -> None:
        self.matching, self.a, self.b = matching, matching.a, matching.b
        self.at_a, self.at_b = matching.places.a, matching.places.b

    # -- rows --------------------------------------------------------------------------------------------------------

    def rows(self) -> Cause:
        matching = self.matching
        lacks = [*self._lacks("B", self.a, matching.only_a, "A"), *self._lacks("A", self.b, matching.only_b, "B")]
        same = len({_key(self.a, each.a.number) for each in matching.pairs if each.cut != "A"})
        same += len({_key(self.b, each.b.number) for each in matching.pairs if each.cut == "A"})
        moved = sum(self._step_of(self.a, each.a) != self._step_of(self.b, each.b) for each in matching.pairs)
        count = len(matching.only_a) + len(matching.only_b) + moved
        words = counted(same, "conversations")
        words = f"{words} {'is' if same == 1 else 'are'} in both" if lacks else f"the same {words}"
        words += f", {moved:,} of them in other steps" if moved else ""
        if not same and count:
            words = "no conversation is in both: record more steps, or the same rows"
        return Cause(count, "; ".join([*lacks, words]))

    def _lacks(self, name: str, other: TokenRecord, only: list[int], other_name: str) -> Iterator[str]:
        """Yields which conversations of the other record this one lacks, and which it has less often."""
        pairs = self.matching.pairs
        paired = {_key(other, (each.a if other is self.a else each.b).number) for each in pairs}
        keys = [_key(other, number) for number in only]
        if missing := {*keys} - paired:
            whole = len({_key(other, number) for number in range(len(other.sketches))})
            yield f"{name} lacks {len(missing):,} of {other_name}'s {whole:,}"
        if repeated := [each for each in keys if each in paired]:
            of = len({*repeated})
            yield f"{other_name} repeats {of:,} of those that are in both, in {len(repeated):,} rows more than {name}"

    @staticmethod
    def _step_of(record: TokenRecord, document: Any) -> int:
        return int(record.step[document.at[0]]) if len(document.at) else 0

    # -- ids ---------------------------------------------------------------------------------------------------------

    def ids(self) -> Cause:
        whole = [each for each in self.matching.pairs if not each.cut]
        unlike = [each for each in whole if not each.is_same]
        if not unlike:
            return Cause(0, "the same ids")
        more = sum(len(each.b.ids) - len(each.aligned) for each in unlike)
        fewer = sum(len(each.a.ids) - len(each.aligned) for each in unlike)
        words = f"B writes {len(unlike):,} of {counted(len(whole), 'conversations')} with other ids: "
        words += f"{more:,} tokens more, {fewer:,} fewer"
        if texts := self._roles_of_other_text(unlike):
            return Cause(more + fewer, f"{words}; other text {_of_roles(texts)}")
        fault, side, how = self._fault_of_ids(unlike)
        longest = max(len(each.b.ids if side == "B" else each.a.ids) for each in unlike)
        return Cause(more + fewer, words + how, fault, side, {"longest": longest})

    def _roles_of_other_text(self, unlike: list[Pair]) -> Counter[int]:
        """Returns the roles of the tokens that only one record has, if all of them are of messages and of no template.

        Empty where one record only has fewer tokens, as one that is cut.
        """
        if all(len(each.aligned) in (len(each.a.ids), len(each.b.ids)) for each in unlike):
            return Counter()
        roles = Counter[int]()
        for each in unlike:
            for column, (record, document) in enumerate(((self.a, each.a), (self.b, each.b))):
                own = np.setdiff1d(np.arange(len(document.ids)), each.aligned[:, column])
                roles.update(record.role[document.at[own]].tolist())
        return roles if roles.keys() <= {*_FROM_PROMPTS, *_MODEL_WRITES} else Counter()

    @cached_property
    def _unsplit(self) -> str:
        """The record, "A" or "B", whose packs cut conversations that were not found again; "" if none or both are."""
        wrapped = [name for name, each in (("A", self.a), ("B", self.b)) if each.facts.get("is_wrapped")]
        is_unlike = any(not (each.cut or each.is_same) for each in self.matching.pairs)
        return wrapped[0] if len(wrapped) == 1 and is_unlike else ""

    def _fault_of_ids(self, unlike: list[Pair]) -> tuple[Fault, str, str]:
        for side, longer in (("B", _more_in_b), ("A", _more_in_a)):
            if all(_is_doubled_beginning(*longer(each)) for each in unlike):
                return Fault.DOUBLED_BOS, side, f"; {side} begins with the same token twice"
        for side, longer in (("A", _more_in_b), ("B", _more_in_a)):
            if all(len(longer(each)[1]) == 1 and longer(each)[1][0] == 0 for each in unlike):
                return Fault.NO_BEGINNING, side, f"; {side} lacks the first token"
            ends = [_cut_of(each, longer) for each in unlike]
            if all(ends):
                where = " and ".join(sorted({str(each) for each in ends}))
                return Fault.ROWS_CUT, side, f"; {side} cuts them at the {where}"
        if self._unsplit:
            how = f"; {self._unsplit}'s packs cut conversations, and ids do not show where; record --conversations"
            return Fault.CUT_BY_PACKING, self._unsplit, how
        return Fault.OTHER_FORMAT, "B", "; another template or tokenizer"

    # -- what is trained ---------------------------------------------------------------------------------------------

    def trained(self) -> Cause:
        a, b, at_a, at_b = self.a, self.b, self.at_a, self.at_b
        in_a, in_b = a.is_trained[at_a], b.is_trained[at_b]
        padding = {name: int((each.is_trained & (each.document < 0)).sum()) for name, each in (("A", a), ("B", b))}
        odd = {name: int((each.is_trained & ~trains_itself(each)).sum()) for name, each in (("A", a), ("B", b))}
        only_a, only_b = at_b[in_a & ~in_b], at_b[in_b & ~in_a]
        words, faults = list[str](), list[tuple[Fault, str]]()
        for name, other, only, lacking in (("B", "A", only_b, only_a), ("A", "B", only_a, only_b)):
            if len(only):
                roles = self._roles(only)
                words.append(f"{name} trains {counted(len(only), 'tokens')} that {other} does not: {_of_roles(roles)}")
                faults += self._faults_of_more(only, roles, name, other, bool(len(lacking)))
        for name, number in padding.items():
            if number != min(padding.values()):
                words.append(f"{name} trains {counted(number, 'tokens')} of padding, or behind the rows")
                faults.append((Fault.PADDING_TRAINED, name))
        for name, record in (("A", a), ("B", b)):
            if odd[name] != min(odd.values()):
                words.append(f"{name} trains other tokens than those of the row, {odd[name]:,} times")
                faults.insert(0, (_fault_of_targets(record), name))
        faults = [] if self._unsplit else faults  # they are borders at other places
        count = len(only_a) + len(only_b) + sum(padding.values()) - 2 * min(padding.values())
        count += abs(odd["A"] - odd["B"])
        fault, side = next(iter(faults), (None, ""))
        return Cause(count, "; ".join(words) or f"the same {int(in_b.sum()):,} tokens", fault, side)

    def _roles(self, at: np.ndarray) -> Counter[int]:
        """Returns the roles of tokens of B, by A where B does not know them."""
        known = dict(zip(self.at_b.tolist(), self.a.role[self.at_a].tolist(), strict=True))
        own = self.b.role[at]
        return Counter(known.get(int(n), UNKNOWN_ROLE) if role == UNKNOWN_ROLE else int(role)
                       for n, role in zip(at, own, strict=True))  # fmt: skip

    def _faults_of_more(
        self, only: np.ndarray, roles: Counter[int], side: str, other: str, lacks: bool
    ) -> Iterator[tuple[Fault, str]]:
        """Yields the faults of training more tokens than the other record, or of the other one that trains fewer."""
        total = sum(roles.values())
        first, first_of_other = self._first_tokens(side), self._first_tokens(other)
        record = self.a if side == "A" else self.b
        is_trained = record.is_trained
        if set(only.tolist()) <= first_of_other:
            return  # nothing is before them there, as where a pack cuts a conversation
        if set(only.tolist()) <= first:
            yield Fault.LABELS_CROSS, side
        elif sum(roles[each] for each in _FROM_PROMPTS):
            yield Fault.PROMPTS_TRAINED, side
        elif sum(roles[each] for each in _MODEL_WRITES) and len({*self.b.id[only].tolist()}) == 1 and not lacks:
            yield Fault.STOP_MASKED, other
        elif roles[_TEMPLATE] == total:
            if self._precede_answers(only):
                yield Fault.HEADERS_TRAINED, side
        elif is_trained.sum() and not (self.b if side == "A" else self.a).is_trained.any():
            yield Fault.NOTHING_TRAINED, other
        elif sum(roles[each] for each in _MODEL_WRITES):
            yield Fault.ANSWERS_LEFT_OUT, other

    def _first_tokens(self, side: str) -> set[int]:
        """Returns the places in B of the first tokens of a record's documents."""
        own, places = ("a", self.at_a) if side == "A" else ("b", self.at_b)
        begins = [getattr(each, own).at[0] for each in self.matching.pairs]
        return set(self.at_b[np.isin(places, begins)].tolist())

    def _precede_answers(self, only: np.ndarray) -> bool:
        """Returns whether a trained token of the model's follows at once on any of B's tokens `only`."""
        behind = np.setdiff1d(only + 1, only)
        behind = behind[behind < len(self.b.id)]
        same = self.b.document[behind] == self.b.document[behind - 1]
        return bool((same & np.isin(self.b.role[behind], _MODEL_WRITES)).any())

    # -- weights -----------------------------------------------------------------------------------------------------

    def weights(self) -> Cause:
        own = {"A": _Weights(self.a), "B": _Weights(self.b)}
        odd = {name: each for name, each in own.items() if each.count}
        if not odd:
            return Cause(0, "each token weighs the same in its step")
        at = self.a.is_trained[self.at_a] & self.b.is_trained[self.at_b]
        of_a, of_b = own["A"].relative[self.at_a[at]], own["B"].relative[self.at_b[at]]
        unlike = int((np.abs(of_a - of_b) > _SAME_WEIGHT * np.abs(of_a)).sum())
        sentence = "; ".join(f"{name}: {each.sentence}" for name, each in odd.items())
        if not unlike:
            return Cause(0, f"the same: {sentence}")
        name = "B" if "B" in odd else "A"
        return Cause(unlike, sentence, odd[name].fault, name)

    # -- context -----------------------------------------------------------------------------------------------------

    def context(self) -> Cause:
        words, faults, counts = list[str](), list[tuple[Fault, str]](), dict[str, int]()
        for name, record in (("A", self.a), ("B", self.b)):
            is_known = record.is_trained & (record.document >= 0) & ~np.isnan(record.reference)
            apart = np.abs(record.context - record.reference)
            is_other = is_known & (apart > _SAME_LOG_PROBABILITY)
            counts[name] = int(is_other.sum())
            if counts[name]:
                size = float(apart[is_other].mean())
                words.append(f"{name} predicts {counts[name]:,} of {int(record.is_trained.sum()):,} trained tokens "
                             f"otherwise beside their neighbors than alone, by {size:.2g} on average")  # fmt: skip
                faults.append((_fault_of_context(record), name))
        for name in "AB":
            if parts := [each for each in self.matching.pairs if each.cut == name]:
                number = len({(each.b if name == "A" else each.a).number for each in parts})
                words.insert(0, f"{name} cuts {counted(number, 'conversations')} into {len(parts):,} parts")
                faults.append((Fault.CUT_BY_PACKING, name))
                counts[name] = max(counts[name], int(sum(len(each.aligned) for each in parts)))
        if not any(counts.values()):
            return Cause(0, "each conversation is predicted as alone")
        if self._is_equal("context", "reference"):
            return Cause(0, f"the same: {'; '.join(words)}")
        faults.sort(key=lambda each: each[0] is not Fault.CUT_BY_PACKING)
        fault, name = max(faults, key=lambda each: counts[each[1]])
        config = self.b.facts if name == "B" else self.a.facts
        values = {"name": config.get("model_type", "this model"), "attention": config.get("attention")}
        return Cause(max(counts.values()), "; ".join(words), fault, name, values)

    # -- the model ---------------------------------------------------------------------------------------------------

    def model(self) -> Cause:
        a, b, words = self.a, self.b, list[str]()
        is_same = self._is_one
        of_weights = np.abs(a.reference[self.at_a][is_same] - b.reference[self.at_b][is_same])
        count = int(np.nansum(of_weights > _SAME_LOG_PROBABILITY))
        if count:
            words.append(
                f"the models are not the same: {_of_norms(*(each.facts.get('weight_norms', {}) for each in (a, b)))}"
            )
        for name, record in (("A", a), ("B", b)):
            apart = np.abs(record.own - record.context)[record.is_trained]
            number = int((apart > _SAME_LOG_PROBABILITY).sum())
            if number:
                kinds = ", ".join(record.facts.get("dtypes", []))
                if (autocast := record.facts.get("autocast", "none")) != "none":
                    kinds += f", autocast to {autocast}"
                words.append(f"{name} computes {number:,} tokens otherwise than in float32 without dropout ({kinds})")
                count += number
        if words and self._is_equal("own", "context", "reference"):
            count, words = 0, [f"the same: {'; '.join(words)}"]
        words = words or ["the same function in the same type"]
        for name in ("attention", "autocast", "dropout"):
            values = [record.facts.get(name, "not recorded") for record in (a, b)]
            if values[0] != values[1]:
                words.append(f"{name} {values[0]} in A, {values[1]} in B")
        return Cause(count, "; ".join(words))

    def _is_equal(self, *names: str) -> bool:
        """Returns whether both records have the same tokens with the same log-probabilities of these kinds."""
        a, b = self.a, self.b
        if len(self.at_a) != len(a.id) or len(self.at_b) != len(b.id):
            return False
        pairs = [(getattr(a, name)[self.at_a], getattr(b, name)[self.at_b]) for name in names]
        return all(np.allclose(*pair, atol=_SAME_LOG_PROBABILITY, rtol=0, equal_nan=True) for pair in pairs)

    @cached_property
    def _is_one(self) -> np.ndarray:
        at = self.matching.places
        return (
            at.is_same
            & ~(at.is_cut_a | at.is_cut_b)
            & trains_itself(self.a)[self.at_a]
            & trains_itself(self.b)[self.at_b]
        )

    def residual(self) -> Cause:
        words = []
        for name, record in (("A", self.a), ("B", self.b)):
            own = float(-(record.weight * record.own).sum()) / record.num_steps
            if not _is_its_sum(record):
                words.append(f"{name}'s loss is {record.loss:.6g}, and its tokens' cross-entropies make {own:.6g}")
        return Cause(len(words), "; ".join(words))


class _Weights:
    """The weights of a record against the ratio of each step."""

    def __init__(self, record: TokenRecord) -> None:
        is_trained = record.is_trained
        counts = np.bincount(record.step[is_trained], minlength=record.num_steps)
        self.relative = record.weight * counts[record.step]
        """1 for each trained token of a sound trainer."""
        self._record, self._at = record, np.flatnonzero(is_trained)
        self.count = int((np.abs(self.relative[is_trained] - 1) > _SAME_WEIGHT).sum())

    @cached_property
    def _kind(self) -> tuple[Fault | None, str]:
        record, at = self._record, self._at
        own, total = self.relative[at], float(record.weight.sum()) / record.num_steps
        micro = record.step[at] * 100_000 + record.micro_batch[at]
        if np.ptp(own) <= _SAME_WEIGHT * abs(own[0]):
            if abs(own[0] - len(at) / record.num_steps) <= _SAME_WEIGHT * own[0]:
                return Fault.UNDIVIDED, "the sum of the token losses is not divided"
            number = len(np.unique(micro)) / record.num_steps
            if number > 1 and abs(own[0] - number) <= _SAME_WEIGHT * number:
                return Fault.MEAN_OF_MEANS, f"the means of {number:g} micro-batches are added"
        of_step = [own[record.step[at] == each] for each in np.unique(record.step[at])]
        if all(np.ptp(each) <= _SAME_WEIGHT * abs(each[0]) for each in of_step):
            divided = self._divided([len(each) / float(each[0]) for each in of_step])
            if not _is_its_sum(record):
                return None, f"{divided}; the loss is no sum of cross-entropies, as with label smoothing"
            if number := record.facts.get("num_skipped"):
                return (
                    Fault.ROWS_SKIPPED,
                    f"{divided}, because the step loses the gradients of {counted(number, 'micro-batches')}",
                )
            return Fault.OTHER_COUNT, divided
        of_micro = [own[micro == each] for each in np.unique(micro)]
        if all(np.ptp(each) <= _SAME_WEIGHT * abs(each[0]) for each in of_micro):
            of = f"tokens weigh {_span(own)} by their micro-batch, {total:.4g} in all"
            return Fault.MEAN_OF_MEANS, f"a mean of means: {of}"
        group = micro * 100_000 + record.document[at]
        rows = [own[group == each] for each in np.unique(group)]
        if all(np.ptp(each) <= _SAME_WEIGHT * abs(each[0]) for each in rows):
            return Fault.MEAN_BY_SEQUENCE, "each conversation weighs the same, however many tokens it has"
        return None, f"tokens weigh {_span(own)}, {total:.4g} in all"

    def _divided(self, divisors: list[float]) -> str:
        """Returns what the divisors of the steps are."""
        record, at = self._record, self._at
        what = "the sum is" if len(divisors) == 1 else "the sums of the steps are"
        words = f"{what} divided by {math.fsum(divisors):,.6g}, and {len(at):,} tokens are trained"
        of_rows = np.stack([record.step, record.micro_batch, record.row])[:, record.document >= 0]
        num_rows = np.bincount(np.unique(of_rows, axis=1)[0], minlength=record.num_steps)
        steps, num_trained = np.unique(record.step[at], return_counts=True)
        more, whole = np.array(divisors) - num_trained, num_rows[steps]
        is_whole = np.abs(more - more.round()).max() < 0.1
        if is_whole and more.min() > -0.1 and more.sum() > 0.9 and (more < whole + 0.1).all():
            rows = "each row" if np.allclose(more, whole, atol=0.1) else f"{more.sum():.0f} of {whole.sum()} rows"
            words += f", as if the first token of {rows} were counted, which nothing predicts"
        return words

    @property
    def fault(self) -> Fault | None:
        return self._kind[0]

    @property
    def sentence(self) -> str:
        return self._kind[1]


def _span(values: np.ndarray) -> str:
    """Returns the least and the largest value, with as many digits as tell them apart."""
    texts = ([f"{each:.{digits}g}" for each in (values.min(), values.max())] for digits in (3, 6, 9))
    least, largest = next((each for each in texts if each[0] != each[1]), [f"{values[0]:.3g}"] * 2)
    return f"{least} to {largest}"


def _is_its_sum(record: TokenRecord) -> bool:
    """Returns whether the loss is that of its tokens' cross-entropies by their weights."""
    own = float(-(record.weight * record.own).sum()) / record.num_steps
    return abs(record.loss - own) <= 1e-5 * abs(record.loss)


def _key(record: TokenRecord, number: int) -> bytes:
    """Returns what identifies the text of a conversation within a record."""
    return record.sketches[number].tobytes()


def _of_norms(a: Mapping[str, float], b: Mapping[str, float]) -> str:
    """Returns how the norms of two models' tensors differ; one of another name and the same norm is renamed."""
    if not (a and b):
        return f"{'B' if a else 'A'} lacks the norms of tensors"
    both, only_a, only_b = [n for n in a if n in b], [n for n in a if n not in b], [n for n in b if n not in a]
    unlike = sum(not math.isclose(a[n], b[n], rel_tol=1e-6) for n in both)
    words, renamed = [f"{unlike:,} of {len(both):,} tensors have other norms"], list[str]()
    for own in list(only_a):
        if same := next((other for other in only_b if math.isclose(a[own], b[other], rel_tol=1e-6)), None):
            renamed.append(f"{own} is {same} in B")
            only_a.remove(own)
            only_b.remove(same)
    words += [f"{len(renamed):,} are renamed: {renamed[0]}" + ", ..." * (len(renamed) > 1)] if renamed else []
    words += [f"{name} alone has {len(own):,}: {own[0]}" + ", ..." * (len(own) > 1)
              for name, own in (("A", only_a), ("B", only_b)) if own]  # fmt: skip
    return ", ".join(words)


def _of_roles(roles: Counter[int]) -> str:
    names = {role: f"of the {name}" for role, name in enumerate(ROLE_NAMES)}
    return ", ".join(f"{n:,} {names.get(role, 'of unknown role')}" for role, n in roles.most_common())


def _more_in_b(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """Returns B's ids, and the places of those that A does not have; none if A has some that B does not."""
    is_subset = len(pair.aligned) == len(pair.a.ids)
    own = np.setdiff1d(np.arange(len(pair.b.ids)), pair.aligned[:, 1])
    return pair.b.ids, own if is_subset else own[:0]


def _more_in_a(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    is_subset = len(pair.aligned) == len(pair.b.ids)
    own = np.setdiff1d(np.arange(len(pair.a.ids)), pair.aligned[:, 0])
    return pair.a.ids, own if is_subset else own[:0]


def _is_doubled_beginning(ids: np.ndarray, more: np.ndarray) -> bool:
    return len(more) == 1 and more[0] <= 1 and len(ids) > 1 and ids[0] == ids[1]


def _cut_of(pair: Pair, longer: Callable[[Pair], tuple[np.ndarray, np.ndarray]]) -> str:
    """Returns the end at which ids are missing: "beginning" or "end"; "" if they are not missing at one end."""
    ids, more = longer(pair)
    if not len(more) or np.ptp(more) != len(more) - 1:
        return ""
    return "beginning" if more[0] == 0 else "end" if more[-1] == len(ids) - 1 else ""


def _fault_of_targets(record: TokenRecord) -> Fault:
    at = np.flatnonzero(record.is_trained & ~trains_itself(record))
    behind, before = np.minimum(at + 1, len(record.id) - 1), np.maximum(at - 1, 0)
    if (record.target[at] == record.id[behind]).mean() > 0.5:
        return Fault.SHIFTED_LABELS
    if (record.target[at] == record.id[before]).mean() > 0.5:
        return Fault.UNSHIFTED_LABELS
    return Fault.MASKED_IDS


def _fault_of_context(record: TokenRecord) -> Fault:
    """Returns the fault of a record whose tokens are predicted otherwise than alone."""
    rows = set(zip(record.step.tolist(), record.micro_batch.tolist(), record.row.tolist(), strict=True))
    is_packed = len(np.unique(record.document[record.document >= 0])) > len(rows)
    arguments = record.facts.get("arguments", [])
    at, sees = record.document >= 0, np.zeros(len(record.id), dtype=np.uint64)
    for number in np.unique(record.document[at]):
        own = np.flatnonzero(record.document == number)
        sees[own] = own_prefixes(record.id[own])[:-1]
    sees_others = bool((sees != record.sees)[at & (record.sees != 0)].any())
    if is_packed and sees_others:
        return Fault.NO_POSITIONS
    if is_packed:
        return Fault.MASK_OF_ONES if {"attention_mask", "position_ids"} <= set(arguments) else Fault.NOT_ISOLATED
    return Fault.PADDING_ATTENDED if sees_others else Fault.NOT_AS_ALONE
