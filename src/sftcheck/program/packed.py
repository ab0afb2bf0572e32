"""The program for a model that does not keep packed documents apart: documents in one row, beside other tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import DataCollatorWithFlattening, PreTrainedModel

from sftcheck.program.program import comment_of, confirmed, makes_small_model, text_of
from sftcheck.program.quoting import NoSourceError, called, literal
from sftcheck.program.rebuild import IMPORTS, SMALL, config_of, defaults_of, settings_of
from sftcheck.program.search import Search, smallest, without_parts
from sftcheck.program.source import Names

_LOGITS = """\
def logits(documents):
    batch = collator([{'input_ids': each} for each in documents])
    batch.pop('labels')
    with torch.no_grad():
        return model(**batch).logits[0].split([len(each) for each in documents])"""
_BOTH = """\
at, most = (found - wanted).abs().argmax(), float(wanted.abs().max())
found, wanted = float(found.flatten()[at]), float(wanted.flatten()[at])"""
_NEIGHBORS = f"""
is_wrong = False
for n, found in enumerate(logits(documents)):
    others = [each if m == n else [abs(id - 1) for id in each] for m, each in enumerate(documents)]
    wanted = logits(others)[n]
    {_BOTH.replace(chr(10), chr(10) + "    ")}
    print(f'document {{n}}: a logit is {{found:.5g}}; wanted {{wanted:.5g}}, as beside documents of other tokens')
    is_wrong |= abs(found - wanted) > 1e-4 * most
sys.exit(is_wrong)"""
_FUTURE = f"""
(found,), (wanted,) = logits([documents[0][:-1] + documents[0][:1]]), logits(documents[:1])
found, wanted = found[:-1], wanted[:-1]
{_BOTH}
print(f'a logit in front of another last token is {{found:.5g}}; wanted {{wanted:.5g}}, as before it changed')
sys.exit(abs(found - wanted) > 1e-4 * most)"""
_SENTENCES = {
    _NEIGHBORS: "The logits of a document change with the tokens of another document in its row.",
    _FUTURE: "A token is predicted from those after it.",
}


@dataclass(frozen=True)
class PackedProgram:
    """Source text by its place."""

    names: Names
    model: str
    """The expression of the model, which may take `config`."""
    collator: str
    documents: tuple[Sequence[int], ...]
    measurement: str
    config_class: str = ""
    config: Mapping[str, str] | None = None
    """The arguments of the configuration; None for a model without one of its own."""
    own_config: frozenset[str] = frozenset()
    """The names of `config` that are those of its class; the others come from a file."""

    @property
    def setup(self) -> list[str]:
        lines = ["torch.manual_seed(0)", f"model = {self.model}.eval()"]
        if self.config is not None:
            lines.insert(1, f"config = {called(self.config_class, [], self.config, self.own_config)}")
        return lines

    @property
    def text(self) -> str:
        measured = [
            f"documents = {literal([list(each) for each in self.documents])}",
            f"collator = {self.collator}",
            *(_LOGITS + self.measurement).split("\n"),
        ]
        return text_of(self.names, comment_of(_SENTENCES[self.measurement]), (), self.setup, measured)

    @property
    def is_small(self) -> bool:
        return makes_small_model(self.names, self.setup)


def packed_script(model: nn.Module, documents: Sequence[Sequence[int]], keys: Mapping[str, bool], *,
                  is_future: bool) -> str:  # fmt: skip
    """Returns the smallest program that was found in which documents of one row change each other.

    Args:
        documents: The ids of each.
        keys: The arguments of DataCollatorWithFlattening.
        is_future: Whether documents are apart, and tokens attend to those after them.

    Raises:
        ValueError: None was found; the message says why.
    """
    search, names = Search(), Names(IMPORTS)
    given = {name: literal(each) for name, each in keys.items()}
    collator = called(names.name_of(DataCollatorWithFlattening), [], given)
    start = PackedProgram(names, "", collator, tuple(documents), _FUTURE if is_future else _NEIGHBORS)
    for program in _candidates(start, model, search.errors):
        if search.shows(program):
            return confirmed(_shrunk(program, search).text)
    raise ValueError("; ".join(["no program of the model's class shows it", *dict.fromkeys(search.errors)][:4]))


def _candidates(start: PackedProgram, model: Any, errors: list[str]) -> Iterator[PackedProgram]:
    """Yields the programs with a small model of the class, with one of its own size, and with that of its folder."""
    names = start.names
    try:
        if not isinstance(model, PreTrainedModel):
            yield replace(start, model=names.call(model))
            return
        name, config = names.name_of(type(model)), model.config
        options = {"attn_implementation": literal(config._attn_implementation)}
        if hasattr(config, "use_cache"):
            options["use_cache"] = literal(config.use_cache)
        made = replace(start, model=f"{name}(config)", config_class=names.name_of(type(config)))
        own, defaults = settings_of(config), defaults_of(config)
        for is_reduced in (True, False):
            sizes = config_of(names, own, defaults, literal(config.vocab_size), is_small=is_reduced)
            own_names = frozenset({*SMALL, *defaults, *options, "vocab_size"})
            program = replace(made, config={**sizes, **options}, own_config=own_names)
            if is_reduced or program.is_small:
                yield program
        if config.name_or_path:
            loaded = called(
                f"{name}.from_pretrained", [literal(config.name_or_path)], {"dtype": "torch.float32", **options}
            )
            yield replace(start, model=loaded)
    except NoSourceError as error:
        errors.append(str(error))


def _shrunk(program: PackedProgram, search: Search) -> PackedProgram:
    """Returns the program with the fewest documents, and without settings that it does not need."""

    def having(documents: Sequence[Sequence[int]]) -> PackedProgram:
        return replace(program, documents=tuple(documents))

    program = smallest(program.documents, having, search.shows, least=1)
    return program if program.config is None else without_parts(program, "config", search, ("use_cache",))
