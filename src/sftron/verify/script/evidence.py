"""The lines of a program that measure the fault of a failed row, with transformers and torch alone.

Each kind of failure has its own lines. They end with `sys.exit(True)` if the fault shows, and never show one in a sound
trainer, however its rows are shortened. They may use `trainer`, `tokenizer`, `rows`, and for conversations and ids
`documents`, the ids of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sftron.verify.script.program import Program

_FEW, _PAIRS = (1, 2, 4, 8, 16, 32), (2, 3, 4, 8, 16, 32)
_NEEDS_STEP = {"max_steps": "1", "save_strategy": "'no'"}


@dataclass(frozen=True)
class Facts:
    """What the check has seen of the trainer, its batches and its template."""

    header: str
    """What the template writes in front of an answer; "" if it writes nothing of its own there."""
    stop: str
    """The token that ends an answer, or should."""
    has_stop: bool
    beginning: str
    """What every conversation begins with."""
    num_answers: int | None = None
    """The number of answers at the end of a row that are to be trained; None for all."""
    twice: str = ""
    """What a question begins with if the template is applied to what it has written."""
    is_everything: bool = False
    is_text: bool = False
    """Whether the rows are texts without a template."""
    is_marked_by_trl: bool = False
    has_conversations: bool = False
    """Whether `conversations` are the conversations of the rows, whose own columns do not hold them."""
    has_positions: bool = False
    has_mask: bool = False
    is_packed: bool = False
    is_adapter: bool = False
    pads_with_stop: bool = False
    columns: tuple[str, ...] = ()
    """The columns that the collator takes."""


@dataclass(frozen=True)
class Evidence:
    """Attributes:
    sentence: What is wrong if the program exits with 1.
    lines: The measurement.
    num_rows: The numbers of rows that are tried.
    fits: Whether it measures anything in such a trainer.
    given: The arguments that the measurement needs.
    """

    sentence: str
    lines: Callable[[Program, Facts], list[str]]
    num_rows: tuple[int, ...] = (1,)
    fits: Callable[[Program, Facts], bool] = lambda _program, _facts: True
    given: Mapping[str, str] = field(default_factory=dict)
    compares: bool = False
    """Whether it compares the rows with their conversations."""
    words: tuple[str, ...] = ()
    """Words of what the check has measured if it is this kind of failure; a kind without words may be any."""

    def order(self, measured: str) -> int:
        """Returns its place among the kinds of failure that are tried: the one that was measured first."""
        return 1 if not self.words else 0 if any(each in measured for each in self.words) else 2


def _batch(program: Program) -> str:
    return f"batch = next(iter({program.loader}))"


_LOGITS = (
    "def logits(ids):",
    "    with torch.no_grad():",
    "        return trainer.model.eval()(**{**batch, 'input_ids': ids, 'labels': None}).logits",
)


def _documents(program: Program) -> str:
    return f"{program.measured.prefix}documents"


# -- ids ---------------------------------------------------------------------------------------------------------------


def _wanted(program: Program, facts: Facts) -> list[str]:
    if facts.has_conversations:
        return ["wanted = tokenizer.apply_chat_template(conversations[0], return_dict=False)"]
    return [*program.measured.documents_line(), f"wanted = {_documents(program)}[0]"]


def _has_wanted(program: Program, facts: Facts) -> bool:
    return facts.has_conversations or _has_conversations(program, facts)


def _ids_differ(program: Program, facts: Facts) -> list[str]:
    return [
        _batch(program),
        "found = batch['input_ids'][0].tolist()",
        *_wanted(program, facts),
        "at = next((n for n, pair in enumerate(zip(found, wanted)) if pair[0] != pair[1]), len(wanted))",
        "print(f'token {at} of the row begins {tokenizer.decode(found[at : at + 8])!r}')",
        "print(f'wanted {tokenizer.decode(wanted[at : at + 8])!r}, as the chat template writes')",
        "sys.exit(at < len(wanted))",
    ]


def _text_after(program: Program, facts: Facts) -> list[str]:
    return [
        _batch(program),
        *_wanted(program, facts),
        "found = tokenizer.decode(batch['input_ids'][0][len(wanted) :], skip_special_tokens=True).strip()",
        "print(f'behind the conversation, the row has {found!r}; wanted nothing')",
        "sys.exit(found != '')",
    ]


def _no_header(program: Program, facts: Facts) -> list[str]:
    return [
        _batch(program),
        "text = tokenizer.decode(batch['input_ids'][0])",
        f"header = {facts.header!r}",
        "print(f'the row begins {text[:80]!r}')",
        "print(f'it has {header!r} {text.count(header)} times; wanted once for each answer')",
        "sys.exit(header not in text)",
    ]


def _applied_twice(program: Program, facts: Facts) -> list[str]:
    return [
        _batch(program),
        "text = tokenizer.decode(batch['input_ids'][0])",
        f"found = text.count({facts.twice!r})",
        "print(f'the row begins {text[:100]!r}')",
        "print(f'the template begins within {found} of its questions; wanted 0')",
        "sys.exit(found > 0)",
    ]


def _no_template(program: Program, facts: Facts) -> list[str]:
    return [
        "with tempfile.TemporaryDirectory() as folder:",
        "    trainer.save_model(folder)",
        "    found = AutoTokenizer.from_pretrained(folder).chat_template",
        _batch(program),
        "text = tokenizer.decode(batch['input_ids'][0][:40])",
        "print(f'the rows are rendered: {text!r}')",
        "print(f'the chat template of the saved tokenizer is {found!r}; wanted the one that rendered them')",
        "sys.exit(found is None)",
    ]


# -- labels ------------------------------------------------------------------------------------------------------------


def _labels_other(program: Program, facts: Facts) -> list[str]:
    return [
        _batch(program),
        "labels = batch['labels']",
        "found = int(((labels != -100) & (labels != batch['input_ids'])).sum())",
        "print(f'{found} of {int((labels != -100).sum())} labels are another token than that at their place; wanted 0')",
        "sys.exit(found > 0)",
    ]


_SPANS = (
    "labels = batch['labels'][0].tolist()",
    "spans = [list(each) for has_label, each in groupby(labels, lambda label: label != -100) if has_label]",
)


def _answers(program: Program, facts: Facts) -> list[str]:
    strip = "strip()" if facts.is_marked_by_trl else "strip(' ').rstrip()"
    last = "" if facts.num_answers is None else f"[-{facts.num_answers} :]"
    wanted = [
        f"header, stop = {facts.header!r}, {facts.stop!r}",
        "text = tokenizer.decode(batch['input_ids'][0])",
        f"wanted = re.findall(re.escape(header) + '(.*?' + re.escape(stop) + ')', text, re.DOTALL){last}",
        f"wanted = [each.{strip} for each in wanted]",
    ]
    if facts.is_text:
        name = program.measured.prefix
        wanted = [f"wanted = [{name}rows[0]['completion'].{strip} + tokenizer.eos_token]"]
    return [
        _batch(program),
        *_SPANS,
        f"found = [tokenizer.decode(span).{strip} for span in spans]",
        *wanted,
        "print(f'trained: {found}')",
        "print(f'wanted: {wanted}, which is what the model has to write')",
        "sys.exit(bool(wanted) and found != wanted)",
    ]


def _everything(program: Program, facts: Facts) -> list[str]:
    return [
        _batch(program),
        "found = tokenizer.decode(batch['input_ids'][0, 1:][batch['labels'][0, 1:] == -100])",
        "print(f'tokens without a label: {found!r}; wanted none')",
        "sys.exit(found != '')",
    ]


def _stops(program: Program, facts: Facts) -> list[str]:
    wanted = facts.num_answers if facts.num_answers is not None else f"text.count({facts.header!r})"
    wanted = 1 if facts.is_text else wanted
    return [
        _batch(program),
        "text = tokenizer.decode(batch['input_ids'][0])",
        f"stop = tokenizer.convert_tokens_to_ids({facts.stop!r})",
        "is_trained = (batch['labels'][0] == stop) & (batch['input_ids'][0] == stop)",
        f"found, wanted = int(is_trained.sum()), {wanted}",
        f"print(f'{{found}} answers of {{text!r}} train {facts.stop}; wanted {{wanted}}')",
        "sys.exit(found < wanted)",
    ]


# -- bounds ------------------------------------------------------------------------------------------------------------


def _border(program: Program, facts: Facts) -> list[str]:
    """Returns the lines that find where the second conversation of the first row begins."""
    if facts.has_positions:
        return ["border = int((batch['position_ids'][0] == 0).nonzero()[1])"]
    return [
        *program.measured.documents_line(),
        "row = batch['input_ids'][0].tolist()",
        f"border = next(len(ids) for ids in {_documents(program)} if row[: len(ids)] == ids and len(row) > len(ids))",
    ]


def _in_one_row(program: Program, facts: Facts) -> list[str]:
    return [
        _batch(program),
        *_border(program, facts),
        "ids = batch['input_ids'].clone()",
        "ids[0, :border] = (ids[0, :border] + 7) % len(tokenizer)",
        *_LOGITS,
        "found = float((logits(ids) - logits(batch['input_ids']))[0, border:].abs().max())",
        "print(f'other tokens in the first conversation change the logits of the second by {found:.3g}; wanted 0')",
        "sys.exit(found > 1e-4)",
    ]


def _in_other_rows(program: Program, facts: Facts) -> list[str]:
    return [
        _batch(program),
        "ids = batch['input_ids'].clone()",
        "ids[0] = (ids[0] + 7) % len(tokenizer)",
        *_LOGITS,
        "found = float((logits(ids) - logits(batch['input_ids']))[1:].abs().max())",
        "print(f'other tokens in the first row change the logits of the others by {found:.3g}; wanted 0')",
        "sys.exit(found > 1e-4)",
    ]


def _future(program: Program, facts: Facts) -> list[str]:
    return [
        _batch(program),
        "ids = batch['input_ids'].clone()",
        "ids[0, -1] = (ids[0, -1] + 7) % len(tokenizer)",
        *_LOGITS,
        "found = float((logits(ids) - logits(batch['input_ids']))[0, :-1].abs().max())",
        "print(f'another last token changes the logits before it by {found:.3g}; wanted 0')",
        "sys.exit(found > 1e-4)",
    ]


def _labels_cross(program: Program, facts: Facts) -> list[str]:
    return [
        _batch(program),
        *_border(program, facts),
        "found = int(batch['labels'][0, border])",
        "print(f'the label of the first token of the second conversation is {found}; wanted -100')",
        "sys.exit(found != -100)",
    ]


def _alone_in_pack(program: Program, facts: Facts) -> list[str]:
    return [
        _batch(program),
        *_border(program, facts),
        "with torch.no_grad():",
        "    together = trainer.model.eval()(**{**batch, 'labels': None}).logits[:, border:]",
        "    alone = trainer.model(input_ids=batch['input_ids'][:, border:]).logits",
        "found = float((together - alone)[:, : alone.shape[1]].abs().max())",
        "print(f'the logits of the second conversation are {found:.3g} from those of its ids alone; wanted 0')",
        "sys.exit(found > 1e-3)",
    ]


def _alone_in_batch(program: Program, facts: Facts) -> list[str]:
    return [
        _batch(program),
        "found, model = 0.0, trainer.model.eval()",
        "with torch.no_grad():",
        "    for row, logits in zip(batch['input_ids'], model(**{**batch, 'labels': None}).logits):",
        "        real = (row != tokenizer.pad_token_id).nonzero()",
        "        begin, end = int(real[0]), int(real[-1]) + 1",
        "        alone = model(input_ids=row[None, begin:end]).logits[0, -1]",
        "        found = max(found, float((alone - logits[end - 1]).abs().max()))",
        "print(f'the last logits of a row are {found:.3g} from those of its ids alone; wanted 0')",
        "sys.exit(found > 1e-3)",
    ]


# -- truncation --------------------------------------------------------------------------------------------------------


def _whole(program: Program, facts: Facts) -> list[str]:
    rows, columns = f"{program.measured.prefix}rows", program.measured.columns
    source = "row['prompt'] + row['completion']" if "prompt" in columns else f"row[{program.measured.text_column!r}]"
    tools = ", tools=row['tools']" if "tools" in columns else ""
    texts = f"[tokenizer.apply_chat_template({source}{tools}, tokenize=False).strip() for row in {rows}]"
    if facts.has_conversations:
        texts = "[tokenizer.apply_chat_template(each, tokenize=False).strip() for each in conversations]"
    return [
        f"seen = [tokenizer.decode(ids) for batch in {program.loader} for ids in batch['input_ids']]",
        f"wanted = {texts}",
        "wanted = [tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) for text in wanted]",
        "found = sum(any(text in each for each in seen) for text in wanted)",
        "print(f'{found} of {len(wanted)} conversations are whole in a row of the batches; wanted all')",
        "sys.exit(found < len(wanted))",
    ]


def _ends(program: Program, facts: Facts) -> list[str]:
    return [
        f"rows = [tokenizer.decode(ids).strip() for batch in {program.loader} for ids in batch['input_ids']]",
        f"found = sum(row.endswith({facts.stop!r}) for row in rows)",
        "print(f'a row ends {rows[-1][-40:]!r}')",
        f"print(f'{{found}} of {{len(rows)}} rows end with {facts.stop}; wanted all')",
        "sys.exit(found < len(rows))",
    ]


def _begins(program: Program, facts: Facts) -> list[str]:
    return [
        _batch(program),
        "found = tokenizer.decode(batch['input_ids'][0])",
        f"wanted = {facts.beginning!r}",
        "print(f'the row begins {found[:40]!r}; wanted {wanted!r}')",
        "sys.exit(not found.startswith(wanted))",
    ]


def _empty(program: Program, facts: Facts) -> list[str]:
    return [
        f"found = sum(int((batch['labels'] == -100).all(dim=1).sum()) for batch in {program.loader})",
        "print(f'{found} rows of the batches have no label at all; wanted 0')",
        "sys.exit(found > 0)",
    ]


# -- loss --------------------------------------------------------------------------------------------------------------


def _micro_batches(program: Program, facts: Facts) -> list[str]:
    return [
        f"loader, steps = iter({program.loader}), arguments.gradient_accumulation_steps",
        "batches, count = trainer.get_batch_samples(loader, steps, 'cpu')",
        "trainer.current_gradient_accumulation_steps, found, sums = len(batches), [], []",
        "for batch in batches:",
        "    torch.manual_seed(0)",
        "    found.append(round(float(trainer.training_step(trainer.model, dict(batch), count)), 4))",
        "    torch.manual_seed(0)",
        "    logits = trainer.model(**{**batch, 'labels': None}).logits[:, :-1]",
        "    sums.append(float(cross_entropy(logits.flatten(0, 1), batch['labels'][:, 1:].flatten(), reduction='sum')))",
        "number = sum(int((batch['labels'][:, 1:] != -100).sum()) for batch in batches)",
        "wanted = [round(each / number, 4) for each in sums]",
        "print(f'the losses of the micro-batches are {found}')",
        "print(f'wanted {wanted}, their token losses divided by all {number} labels')",
        "sys.exit(any(abs(a - b) > 0.02 * b for a, b in zip(found, wanted)))",
    ]


def _at_other_places(program: Program, facts: Facts) -> list[str]:
    return [
        _batch(program),
        "kept = []",
        "trainer.model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: kept.append(output))",
        "labels = torch.nn.functional.pad(batch['labels'][:, 1:], (0, 1), value=-100) != -100",
        "loss = trainer.compute_loss(trainer.model.eval(), dict(batch), num_items_in_batch=labels.sum())",
        "trained = torch.autograd.grad(loss, kept[0])[0].abs().sum(-1) > 0",
        "missing, others = int((labels & ~trained).sum()), int((trained & ~labels).sum())",
        "print(f'{missing} of {int(labels.sum())} labels are not in the loss; wanted 0')",
        "print(f'{others} tokens without a label are in the loss; wanted 0')",
        "sys.exit(missing + others > 0)",
    ]


def _one_by_one(program: Program, facts: Facts) -> list[str]:
    return [
        f"rows = [{{name: row[name] for name in {facts.columns!r}}} for row in trainer.train_dataset]",
        "def loss(rows):",
        "    batch = trainer.data_collator(rows)",
        "    logits = trainer.model.eval()(**{**batch, 'labels': None}).logits[:, :-1]",
        "    return float(cross_entropy(logits.flatten(0, 1), batch['labels'][:, 1:].flatten(), reduction='sum'))",
        "found, wanted = loss(rows), sum(loss([row]) for row in rows)",
        "print(f'the sum of the token losses of {len(rows)} rows is {found:.4f} together')",
        "print(f'wanted {wanted:.4f}, as one by one')",
        "sys.exit(abs(found / wanted - 1) > 1e-4)",
    ]


# -- padding and forgery -----------------------------------------------------------------------------------------------


def _padding_trained(program: Program, facts: Facts) -> list[str]:
    is_padding = "batch['attention_mask'] == 0" if facts.has_mask else "batch['input_ids'] == tokenizer.pad_token_id"
    return [
        _batch(program),
        f"is_padding = {is_padding}",
        "found = int((batch['labels'][is_padding] != -100).sum())",
        "print(f'{found} of {int(is_padding.sum())} padding tokens have a label; wanted 0')",
        "sys.exit(found > 0)",
    ]


def _text_hidden(program: Program, facts: Facts) -> list[str]:
    return [
        _batch(program),
        "found = int((batch['attention_mask'] == 0).sum())",
        "print(f'the mask of a batch of one row, which has no padding, is 0 at {found} tokens; wanted 0')",
        "sys.exit(found > 0)",
    ]


def _control_tokens(program: Program, facts: Facts) -> list[str]:
    columns, row = program.measured.columns, f"{program.measured.prefix}rows[0]"
    source = f"{row}['prompt'] + {row}['completion']" if "prompt" in columns else f"{row}['messages']"
    return [
        _batch(program),
        "special = set(tokenizer.all_special_ids)",
        f"plain = [{{**message, 'content': 'x'}} for message in {source}]",
        "found = sum(token in special for token in batch['input_ids'][0].tolist())",
        "wanted = sum(token in special for token in tokenizer.apply_chat_template(plain, return_dict=False))",
        "print(f'the row has {found} control tokens; wanted {wanted}, as the template writes')",
        "sys.exit(found > wanted)",
    ]


def _lone_answers(program: Program, facts: Facts) -> list[str]:
    return [
        _batch(program),
        *_SPANS,
        f"found = tokenizer.decode(batch['input_ids'][0]).count({facts.header!r})",
        "print(f'{found} answers begin in the row, as a text spells control tokens; wanted {len(spans)}, which have labels')",
        "sys.exit(0 < len(spans) < found)",
    ]


# -- what is trained and saved -----------------------------------------------------------------------------------------


def _not_in_optimizer(program: Program, facts: Facts) -> list[str]:
    return [
        "trainer.create_optimizer()",
        "held = {id(each) for group in trainer.optimizer.param_groups for each in group['params']}",
        "trainable = {name: each for name, each in trainer.model.named_parameters() if each.requires_grad}",
        "found = [name for name, each in trainable.items() if id(each) not in held]",
        "print(f'{len(found)} of {len(trainable)} trainable tensors are not in the optimizer: {found[:2]}; wanted 0')",
        "sys.exit(len(found) > 0)",
    ]


def _not_saved(program: Program, facts: Facts) -> list[str]:
    program.names.imports["get_peft_model_state_dict"] = "from peft import get_peft_model_state_dict"
    return [
        "saved = get_peft_model_state_dict(trainer.model, save_embedding_layers=False).values()",
        "pointers = {each.data_ptr() for each in saved}",
        "trainable = {name: each for name, each in trainer.model.named_parameters() if each.requires_grad}",
        "found = [name for name, each in trainable.items() if each.data_ptr() not in pointers]",
        "print(f'{len(found)} of {len(trainable)} trainable tensors are not saved with the adapter; wanted 0')",
        "sys.exit(len(found) > 0)",
    ]


def _untrained_tokens(program: Program, facts: Facts) -> list[str]:
    return [
        _batch(program),
        "layer = trainer.model.get_input_embeddings()",
        "distances = (layer.weight - layer.weight.mean(dim=0)).norm(dim=1)",
        "tokens = {*batch['input_ids'].flatten().tolist()} & {*tokenizer.get_added_vocab().values()}",
        "new = [n for n in tokens - {layer.padding_idx} if distances[n] < 0.1 * distances.median()]",
        "is_trained = any(each.requires_grad for each in layer.parameters())",
        "print(f'embeddings that are the mean of all, as those of new tokens: {tokenizer.convert_ids_to_tokens(new)}')",
        "print(f'the embeddings are trained: {is_trained}; wanted no such token, or True')",
        "sys.exit(bool(new) and not is_trained)",
    ]


def _ends_of_folder(program: Program, facts: Facts) -> list[str]:
    ends = ["    ends = GenerationConfig.from_pretrained(folder).eos_token_id"]
    ends = ["    ends = trainer.model.generation_config.eos_token_id"] if facts.is_adapter else ends
    return [
        _batch(program),
        f"stop = tokenizer.convert_tokens_to_ids({facts.stop!r})",
        "number = int((batch['labels'] == stop).sum())",
        "trainer.train()",
        "with tempfile.TemporaryDirectory() as folder:",
        "    trainer.save_model(folder)",
        *ends,
        "ends = ends if isinstance(ends, list) else [ends]",
        "print(f'the saved model ends at {tokenizer.convert_ids_to_tokens(ends)}')",
        f"print(f'wanted {facts.stop}, which {{number}} labels of a batch are')",
        "sys.exit(number > 0 and stop not in ends)",
    ]


def _is_assistant(program: Program, facts: Facts) -> bool:
    is_readable = bool(facts.header and facts.stop) if not facts.is_text else "completion" in program.measured.columns
    return not facts.is_everything and is_readable


def _has_conversations(program: Program, facts: Facts) -> bool:
    columns = program.measured.columns
    return not program.measured.is_ids and not facts.is_text and bool({"messages", "completion"} & columns)


def _is_rendered(program: Program) -> bool:
    return program.measured.is_ids or "text" in program.measured.columns


def _is_packed(program: Program, facts: Facts) -> bool:
    return facts.is_packed


def _is_padded(program: Program, facts: Facts) -> bool:
    return not facts.is_packed


def _is_adapter(program: Program, facts: Facts) -> bool:
    return facts.is_adapter


EVIDENCE: dict[str, tuple[Evidence, ...]] = {
    "ids": (
        Evidence("A row has other ids than the tokenizer's chat template writes.", _ids_differ, fits=_has_wanted,
                 compares=True),
        Evidence("A row goes on behind its conversation.", _text_after, fits=_has_wanted, compares=True),
        Evidence("The chat template is applied twice.", _applied_twice, fits=lambda program, facts: bool(facts.twice)),
        Evidence("A row does not have the form of the tokenizer's chat template.", _no_header,
                 fits=lambda program, facts: bool(facts.header) and _is_rendered(program), words=("has the form",)),
        Evidence("The saved tokenizer has no chat template, and the rows were rendered with one.", _no_template,
                 fits=lambda program, facts: not facts.header, words=("no chat template",)),
    ),
    "trained tokens": (
        Evidence("Labels are other tokens than those at their place.", _labels_other, words=("are other tokens",)),
        Evidence("What is trained is not what the model has to write.", _answers, fits=_is_assistant),
        Evidence("Tokens are left out of a loss over everything.", _everything,
                 fits=lambda program, facts: facts.is_everything),
    ),
    "stop tokens": (
        Evidence("The token that ends an answer is not trained.", _stops,
                 fits=lambda program, facts: bool(facts.stop) and (bool(facts.header) or facts.is_text)),
    ),
    "isolation": (
        Evidence("A conversation of a packed row changes another one.", _in_one_row, _PAIRS, _is_packed,
                 words=("in one row",)),
        Evidence("A token is predicted from those after it.", _future, words=("tokens before a changed one",)),
        Evidence("A row of a batch changes another one.", _in_other_rows, _PAIRS, _is_padded),
    ),
    "positions": (
        Evidence("A conversation is predicted from the one before it.", _labels_cross, _PAIRS, _is_packed,
                 words=("labels cross",)),
        Evidence("A conversation is computed otherwise in a packed row than alone.", _alone_in_pack, _PAIRS,
                 _is_packed, words=("wrong starts",)),
        Evidence("A conversation is computed otherwise in a batch than alone.", _alone_in_batch, _FEW, _is_padded),
    ),
    "truncation": (
        Evidence("Conversations are not whole in the batches.", _whole, _FEW, _has_wanted, compares=True),
        Evidence("Rows have nothing to train.", _empty, _FEW, words=("nothing to train",)),
        Evidence("A row ends before its answer does.", _ends, _FEW, lambda program, facts: facts.has_stop),
        Evidence("A row begins within a conversation.", _begins, fits=lambda program, facts: bool(facts.beginning)),
    ),
    "loss": (
        Evidence("A micro-batch has another loss than its token losses, divided by all labels of the step.",
                 _micro_batches, _PAIRS, words=("from the ratio", "times the ratio", "num_items_in_batch")),
        Evidence("The loss is over other tokens than the labels.", _at_other_places, _FEW,
                 words=("the loss ignores",)),
        Evidence("The loss of a row depends on the rows beside it.", _one_by_one, _PAIRS, words=("one by one",)),
    ),
    "padding": (
        Evidence("Padding is trained.", _padding_trained, _PAIRS, words=("padding tokens trained",),
                 fits=lambda program, facts: facts.has_mask or not facts.pads_with_stop),
        Evidence("The attention mask hides text.", _text_hidden, words=("attention mask is 0",),
                 fits=lambda program, facts: facts.has_mask),
        Evidence("Padding is attended to.", _alone_in_batch, _PAIRS, words=("attended",)),
    ),
    "forgery": (
        Evidence("A text's control tokens became control tokens.", _control_tokens, fits=_has_conversations),
        Evidence("A text's control tokens became control tokens.", _lone_answers,
                 fits=lambda program, facts: _is_assistant(program, facts) and program.measured.is_ids),
    ),
    "adapters": (
        Evidence("Trainable tensors are not in the optimizer.", _not_in_optimizer, words=("not in the optimizer",)),
        Evidence("Trainable tensors are not saved with the adapter.", _not_saved, fits=_is_adapter,
                 words=("not saved",)),
        Evidence("New tokens are frozen.", _untrained_tokens, fits=_is_adapter, words=("look untrained",)),
    ),
    "generation": (
        Evidence("The saved model does not end where it is trained to end.", _ends_of_folder, given=_NEEDS_STEP,
                 fits=lambda program, facts: bool(facts.stop)),
    ),
}  # fmt: skip
"""For each row of the table, the kinds of its failure."""
