"""The measurements of programs: one text for each kind of failure, with transformers and torch alone.

A text ends with `sys.exit(True)` if the fault shows, and never shows one in a sound trainer, however its rows are
shortened. The places that begin with $ are filled by evidence.py.
"""

from string import Template


def _with(text: str, **places: str) -> str:
    return Template(text).safe_substitute(places)


# -- ids ---------------------------------------------------------------------------------------------------------------

IDS_DIFFER = """
$batch
found = batch['input_ids'][0].tolist()
$wanted
at = next((n for n, pair in enumerate(zip(found, wanted)) if pair[0] != pair[1]), len(wanted))
print(f'token {at} of the row begins {tokenizer.decode(found[at : at + 8])!r}')
print(f'wanted {tokenizer.decode(wanted[at : at + 8])!r}, as the chat template writes')
sys.exit(at < len(wanted))
"""
TEXT_AFTER = """
$batch
$wanted
found = tokenizer.decode(batch['input_ids'][0][len(wanted) :], skip_special_tokens=True).strip()
print(f'behind the conversation, the row has {found!r}; wanted nothing')
sys.exit(found != '')
"""
APPLIED_TWICE = """
$batch
text = tokenizer.decode(batch['input_ids'][0])
found = text.count($twice)
print(f'the row begins {text[:100]!r}')
print(f'the template begins within {found} of its questions; wanted 0')
sys.exit(found > 0)
"""
NO_HEADER = """
$batch
text = tokenizer.decode(batch['input_ids'][0])
header = $header
print(f'the row begins {text[:80]!r}')
print(f'it has {header!r} {text.count(header)} times; wanted once for each answer')
sys.exit(header not in text)
"""
NO_TEMPLATE = """
with tempfile.TemporaryDirectory() as folder:
    trainer.save_model(folder)
    found = AutoTokenizer.from_pretrained(folder).chat_template
$batch
text = tokenizer.decode(batch['input_ids'][0][:40])
print(f'the rows are rendered: {text!r}')
print(f'the chat template of the saved tokenizer is {found!r}; wanted the one that rendered them')
sys.exit(found is None)
"""

# -- labels ------------------------------------------------------------------------------------------------------------

LABELS_OTHER = """
$batch
ids, labels = batch['input_ids'], batch['labels']
found = int(((labels != -100) & (labels != ids)).sum())
print(f'{found} of {int((labels != -100).sum())} labels are another token than that at their place; wanted 0')
sys.exit(found > 0)
"""
_ANSWERS = """
$batch
$trained
$answers
print(f'trained: {trained}')
print(f'wanted: {wanted}, which is what the model has to write')
sys.exit($is_wrong)
"""
_OF_TEMPLATE = """
text = tokenizer.decode(batch['input_ids'][0])
wanted = [each.$strip for each in re.findall($answer, text, re.DOTALL)$last]
"""
TOO_MUCH = _with(
    _ANSWERS, answers=_OF_TEMPLATE, is_wrong="bool(wanted) and len(''.join(trained)) > len(''.join(wanted))"
)
TOO_LITTLE = _with(_ANSWERS, answers=_OF_TEMPLATE, is_wrong="any(each not in '…'.join(trained) for each in wanted)")
PROMPT = """
$batch
start = int((batch['labels'][0] != -100).nonzero()[0])
header, stop, before = $header.strip(), $stop, tokenizer.decode(batch['input_ids'][0, :start])
print(f'what is trained follows {before[-60:]!r}')
print(f'wanted {header!r}, behind the last {stop!r}')
sys.exit(before.rfind(header) <= before.rfind(stop))
"""
COMPLETION = _with(
    _ANSWERS,
    answers="wanted = [$rows[0]['completion'].removesuffix(tokenizer.eos_token).$strip + tokenizer.eos_token]",
    is_wrong="trained != wanted",
)
EVERYTHING = """
$batch
found = tokenizer.decode(batch['input_ids'][0, 1:][batch['labels'][0, 1:] == -100])
print(f'tokens without a label: {found!r}; wanted none')
sys.exit(found != '')
"""
STOPS = """
$batch
text = tokenizer.decode(batch['input_ids'][0])
stop = tokenizer.convert_tokens_to_ids($stop)
is_trained = (batch['labels'][0] == stop) & (batch['input_ids'][0] == stop)
found, wanted = int(is_trained.sum()), $number
print(f'{found} answers of {text!r} train {tokenizer.decode(stop)!r}; wanted {wanted}')
sys.exit(found < wanted)
"""

# -- isolation and positions -------------------------------------------------------------------------------------------

_CHANGED = """
$batch
ids, model = batch['input_ids'].clone(), trainer.model.eval()
ids[$changed] = (ids[$changed] + 7) % len(tokenizer)
with torch.no_grad():
    before, after = (model(**{**batch, 'input_ids': each, 'labels': None}).logits for each in (batch['input_ids'], ids))
found = float((after - before)[$others].abs().max())
print(f'$words by {found:.3g}; wanted 0')
sys.exit(found > 1e-4)
"""
IN_ONE_ROW = _with(_CHANGED,
    batch="$batch\n$border", changed="0, :border", others="0, border:",
    words="other tokens in the first conversation change the logits of the second",
)  # fmt: skip
IN_OTHER_ROWS = _with(
    _CHANGED, changed="0", others="1:", words="other tokens in the first row change the logits of the others"
)
FUTURE = _with(_CHANGED, changed="0, -1", others="0, :-1", words="another last token changes the logits before it")
LABELS_CROSS = """
$batch
$border
found = int(batch['labels'][0, border])
print(f'the label of the first token of the second conversation is {found}; wanted -100')
sys.exit(found != -100)
"""
ALONE_IN_PACK = """
$batch
$border
with torch.no_grad():
    together = trainer.model.eval()(**{**batch, 'labels': None}).logits[:, border:end]
    alone = trainer.model(input_ids=batch['input_ids'][:, border:end]).logits
found = float((together - alone).abs().max())
print(f'the logits of the second conversation are {found:.3g} from those of its ids alone; wanted 0')
sys.exit(found > 1e-3)
"""
ALONE_IN_BATCH = """
$batch
found, model = 0.0, trainer.model.eval()
with torch.no_grad():
    for row, logits in zip(batch['input_ids'], model(**{**batch, 'labels': None}).logits):
        real = (row != tokenizer.pad_token_id).nonzero()
        begin, end = int(real[0]), int(real[-1]) + 1
        alone = model(input_ids=row[None, begin:end]).logits[0, -1]
        found = max(found, float((alone - logits[end - 1]).abs().max()))
print(f'the last logits of a row are {found:.3g} from those of its ids alone; wanted 0')
sys.exit(found > 1e-3)
"""

# -- truncation --------------------------------------------------------------------------------------------------------

WHOLE = """
seen = [tokenizer.decode(ids) for batch in $loader for ids in batch['input_ids']]
wanted = [tokenizer.apply_chat_template($each, tokenize=False).strip() for $of]
wanted = [tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) for text in wanted]
found = sum(any(text in each for each in seen) for text in wanted)
print(f'{found} of {len(wanted)} conversations are whole in a row of the batches; wanted all')
sys.exit(found < len(wanted))
"""
ENDS = """
stop, seen = $stop, [tokenizer.decode(ids).strip() for batch in $loader for ids in batch['input_ids']]
found = sum(row.endswith(stop) for row in seen)
print(f'a row ends {seen[-1][-40:]!r}')
print(f'{found} of {len(seen)} rows end with {stop!r}; wanted all')
sys.exit(found < len(seen))
"""
BEGINS = """
$batch
found, wanted = tokenizer.decode(batch['input_ids'][0]), $beginning
print(f'the row begins {found[:40]!r}; wanted {wanted!r}')
sys.exit(not found.startswith(wanted))
"""
EMPTY = """
found = sum(int((batch['labels'] == -100).all(dim=1).sum()) for batch in $loader)
print(f'{found} rows of the batches have no label at all; wanted 0')
sys.exit(found > 0)
"""

# -- loss --------------------------------------------------------------------------------------------------------------

MICRO_BATCHES = """
batches, count = trainer.get_batch_samples(iter($loader), arguments.gradient_accumulation_steps, 'cpu')
trainer.current_gradient_accumulation_steps, is_wrong = len(batches), False
number = sum(int((batch['labels'][:, 1:] != -100).sum()) for batch in batches)
for batch in batches:
    torch.manual_seed(0)
    found = float(trainer.training_step(trainer.model, dict(batch), count))
    torch.manual_seed(0)
    logits, labels = trainer.model(**{**batch, 'labels': None}).logits[:, :-1], batch['labels'][:, 1:]
    wanted = float(cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction='sum')) / number
    print(f'the loss of a micro-batch is {found:.4f}; wanted {wanted:.4f}')
    is_wrong |= abs(found - wanted) > 0.02 * wanted
sys.exit(is_wrong)
"""
GRADIENTS = """
batches, count = trainer.get_batch_samples(iter($loader), arguments.gradient_accumulation_steps, 'cpu')
trainer.current_gradient_accumulation_steps, sizes = len(batches), []
trainer.model.zero_grad()
for batch in batches:
    torch.manual_seed(0)
    sizes.append(float(trainer.training_step(trainer.model, dict(batch), count)))
trained = [each for each in trainer.model.parameters() if each.requires_grad]
found = torch.cat([torch.zeros(each.numel()) if each.grad is None else each.grad.flatten() for each in trained])
trainer.model.zero_grad()
for batch, size in zip(batches, sizes):
    torch.manual_seed(0)
    loss = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=count)
    (loss * (size / float(loss))).backward()
wanted = torch.cat([torch.zeros(each.numel()) if each.grad is None else each.grad.flatten() for each in trained])
apart = float((found - wanted).norm() / wanted.norm())
print(f'training_step leaves gradients that are {apart:.3f} from those of its loss; wanted 0')
sys.exit(apart > 0.1)
"""
AT_OTHER_PLACES = """
$batch
kept, head = [], trainer.model.get_output_embeddings()
head.register_forward_hook(lambda module, inputs, output: kept.append(output))
labels = torch.nn.functional.pad(batch['labels'][:, 1:], (0, 1), value=-100) != -100
loss = trainer.compute_loss(trainer.model.eval(), dict(batch), num_items_in_batch=labels.sum())
trained = torch.autograd.grad(loss, kept[0])[0].abs().sum(-1) > 0
missing, others = int((labels & ~trained).sum()), int((trained & ~labels).sum())
print(f'{missing} of {int(labels.sum())} labels are not in the loss; wanted 0')
print(f'{others} tokens without a label are in the loss; wanted 0')
sys.exit(missing + others > 0)
"""
ONE_BY_ONE = """
loader = trainer.get_train_dataloader()
rows = list(loader.dataset)
def loss(rows):
    batch = loader.collate_fn(rows)
    logits, labels = trainer.model.eval()(**{**batch, 'labels': None}).logits[:, :-1], batch['labels'][:, 1:]
    return float(cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction='sum'))
found, wanted = loss(rows), sum(loss([row]) for row in rows)
print(f'the sum of the token losses of {len(rows)} rows is {found:.4f} together')
print(f'wanted {wanted:.4f}, as one by one')
sys.exit(abs(found / wanted - 1) > 1e-4)
"""

# -- padding and forgery -----------------------------------------------------------------------------------------------

PADDING_TRAINED = """
$batch
is_padding = $padding
found = int((batch['labels'][is_padding] != -100).sum())
print(f'{found} of {int(is_padding.sum())} padding tokens have a label; wanted 0')
sys.exit(found > 0)
"""
TEXT_HIDDEN = """
$batch
found = int((batch['attention_mask'] == 0).sum())
print(f'the mask of a batch of one row, which has no padding, is 0 at {found} tokens; wanted 0')
sys.exit(found > 0)
"""
CONTROL_TOKENS = """
$batch
special = set(tokenizer.all_special_ids)
plain = [{**message, 'content': 'x'} for message in $messages]
found = sum(token in special for token in batch['input_ids'][0].tolist())
wanted = sum(token in special for token in tokenizer.apply_chat_template(plain, return_dict=False))
print(f'the row has {found} control tokens; wanted {wanted}, as the template writes')
sys.exit(found > wanted)
"""
LONE_ANSWERS = """
$batch
$trained
found = tokenizer.decode(batch['input_ids'][0]).count($header)
print(f'{found} answers begin in the row, as a text spells control tokens')
print(f'wanted {len(trained)}, which have labels')
sys.exit(0 < len(trained) < found)
"""

# -- what is trained and saved -----------------------------------------------------------------------------------------

_TRAINABLE = """
$held
trainable = {name: each.data_ptr() for name, each in trainer.model.named_parameters() if each.requires_grad}
found = [name for name, pointer in trainable.items() if pointer not in held]
print(f'{len(found)} of {len(trainable)} trainable tensors are not $where: {found[:2]}; wanted 0')
sys.exit(len(found) > 0)
"""
NOT_IN_OPTIMIZER = _with(
    _TRAINABLE,
    held="trainer.create_optimizer()\n"
    "held = {each.data_ptr() for group in trainer.optimizer.param_groups for each in group['params']}",
    where="in the optimizer",
)
NOT_SAVED = _with(
    _TRAINABLE,
    held="saved = get_peft_model_state_dict(trainer.model, save_embedding_layers=False).values()\n"
    "held = {each.data_ptr() for each in saved}",
    where="saved with the adapter",
)
UNTRAINED_TOKENS = """
$batch
layer = trainer.model.get_input_embeddings()
distances = (layer.weight - layer.weight.mean(dim=0)).norm(dim=1)
tokens = {*batch['input_ids'].flatten().tolist()} & {*tokenizer.get_added_vocab().values()}
new = [n for n in tokens - {layer.padding_idx} if distances[n] < 0.1 * distances.median()]
is_trained = any(each.requires_grad for each in layer.parameters())
print(f'embeddings that are the mean of all, as those of new tokens: {tokenizer.convert_ids_to_tokens(new)}')
print(f'the embeddings are trained: {is_trained}; wanted no such token, or True')
sys.exit(bool(new) and not is_trained)
"""
ENDS_OF_FOLDER = """
$batch
stop = tokenizer.convert_tokens_to_ids($stop)
number = int((batch['labels'] == stop).sum())
trainer.train()
with tempfile.TemporaryDirectory() as folder:
    trainer.save_model(folder)
    ends = $ends.eos_token_id
ends = ends if isinstance(ends, list) else [ends]
print(f'the saved model ends at {tokenizer.convert_ids_to_tokens(ends)}')
print(f'wanted {tokenizer.decode(stop)!r}, which {number} labels of a batch are')
sys.exit(number > 0 and stop not in ends)
"""

# -- parts of them -----------------------------------------------------------------------------------------------------

TRAINED = """
trained = groupby(batch['labels'][0].tolist(), lambda label: label != -100)
trained = [tokenizer.decode(list(each)).$strip for has_label, each in trained if has_label]
"""
BORDER_OF_POSITIONS = """
starts = (batch['position_ids'][0] == 0).nonzero().flatten().tolist()
border, end = [*starts, batch['input_ids'].shape[1]][1:3]
"""
BORDER_OF_DOCUMENTS = """
$documents_line
row = batch['input_ids'][0].tolist()
border = next(len(ids) for ids in $documents if row[: len(ids)] == ids and len(row) > len(ids))
end = next((border + len(ids) for ids in $documents if row[border : border + len(ids)] == ids), len(row))
"""
