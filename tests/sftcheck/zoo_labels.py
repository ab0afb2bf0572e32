"""Set-ups of the zoo about labels, of the training and of the evaluation: the rows trained tokens and stop tokens."""

from itertools import pairwise

import torch
import transformers
from datasets import Dataset
from transformers import DataCollatorForLanguageModeling, Trainer

from sftcheck.faults import Fault
from tests.sftcheck.zoo_materials import (
    ANSWERS,
    MISTRAL_LIKE,
    NOT_CHAT,
    PAIRS,
    ROWS,
    CompletionOnly,
    Rows,
    broken,
    encoded,
    marked,
    of_marks,
    padded,
    plain,
    sft,
    smollm2,
    sound,
    tok,
    trl_template,
)
from tests.sftcheck.zoo_proofs import answers_alone, batches, evaluated, labels_are_ids, loss_ratio, read, trained

# ── Broken ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@broken(Fault.PROMPTS_TRAINED, "trained tokens", proof=lambda t: "My sourdough never rises" in trained(t))
def loss_over_prompts() -> Trainer:
    """A `messages` column alone gives a loss over everything, though answers were to be learned (TRL's default)."""
    return sft(ROWS)


@broken(
    Fault.SHIFTED_LABELS,
    "trained tokens",
    proof=lambda t: not labels_are_ids(t),
    may="stop tokens, positions, loss, padding, ids",
)
def labels_shifted_twice() -> Trainer:
    """The collator shifts the labels, and the model shifts them again: each token learns the one after the next."""
    return padded(shift=True)


@broken(Fault.NOTHING_TRAINED, "trained tokens", may="stop tokens, truncation, loss, positions",
        proof=lambda t: all(int(batch["labels"].max()) == -100 for batch in batches(t)))  # fmt: skip
def response_template_not_found() -> Trainer:
    """[/INST] alone has other tokens than behind a word, so the collator finds no answer in any row (trl#980)."""
    tokenizer = tok("llama2", MISTRAL_LIKE)
    tokenizer.pad_token = "<unk>"
    without_system = [row for row in ROWS if row["messages"][0]["role"] != "system"]
    ids = [{"input_ids": row["input_ids"]} for row in encoded(tokenizer, without_system)]
    return plain(ids, tokenizer, CompletionOnly(tokenizer, "[/INST]"))


@broken(Fault.ANSWERS_LEFT_OUT, "trained tokens", may="stop tokens",
        proof=lambda t: "custard tarts" not in trained(t) and "Use the wet afternoon" in trained(t))  # fmt: skip
def last_answer_alone() -> Trainer:
    """Without an instruction template, the completion-only collator trains the last answer of several (trl#456)."""
    tokenizer = tok("chatml")
    ids = [{"input_ids": row["input_ids"]} for row in encoded(tokenizer)]
    return plain(ids, tokenizer, CompletionOnly(tokenizer, "<|im_start|>assistant\n"))


@broken(Fault.PROMPTS_TRAINED, "trained tokens", proof=lambda t: "Rain on day 2. Swap something?" in trained(t))
def everything_after_the_first_prompt() -> Trainer:
    """The prompt of a conversation is taken to be its first question, so all later questions are trained."""
    tokenizer = tok("chatml")
    features = encoded(tokenizer)
    for row in features:
        begin = next(n for n, label in enumerate(row["labels"]) if label != -100)
        row["labels"] = [-100] * begin + row["input_ids"][begin:]
    return plain(features, tokenizer)


@broken(Fault.PAD_IS_STOP, "stop tokens", may="trained tokens", trained_roles="all",
        proof=lambda t: "<|im_end|>" not in trained(t) and "sourdough" in trained(t))  # fmt: skip
def masked_stop_tokens() -> Trainer:
    """DataCollatorForLanguageModeling masks every pad token, and SmolLM2's pad is its stop (transformers#23530)."""
    tokenizer = tok()
    ids = [{"input_ids": row["input_ids"]} for row in encoded(tokenizer)]
    return plain(ids, tokenizer, transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False))


@broken(Fault.STOP_MASKED, "stop tokens", may="trained tokens",  # transformers masks the last bytes of an emoji
        proof=lambda t: "Happy growing!" in trained(t) and "<|im_end|>" not in trained(t))  # fmt: skip
def marks_without_stop() -> Trainer:
    """assistant_only_loss=True with {% generation %} marks that end before <|im_end|>; TRL warns in the log only."""
    return sft(ROWS, tok("chatml", "with_marks_without_stop"), assistant_only_loss=True)


@broken(
    Fault.STOP_MASKED,
    "stop tokens",
    may="trained tokens",
    proof=lambda t: "<|im_end|>" not in trained(t) and "jeudi" in trained(t),
)
def labels_end_before_the_stop() -> Trainer:
    """A script labels exactly the answer's text, and the token that ends it is the template's."""
    tokenizer = tok("chatml")
    features = encoded(tokenizer)
    for row in features:
        row["labels"] = [-100 if label == tokenizer.eos_token_id else label for label in row["labels"]]
    return plain(features, tokenizer)


@broken(Fault.NO_STOP, "stop tokens", may="ids, trained tokens, truncation, generation",
        proof=lambda t: "Happy growing!" in trained(t) and not any(t.processing_class.eos_token in each
                                                                   for each in (read(t), trained(t))))  # fmt: skip
def template_without_stop() -> Trainer:
    """A home-made template writes "role: text" and a newline: nothing says that an answer ends (trl#1623)."""
    return sft(ANSWERS, tok("chatml", NOT_CHAT))


QUESTION = "sourdough never rises"


@broken(
    Fault.PROMPTS_TRAINED, "trained tokens", proof=lambda t: QUESTION in evaluated(t) and QUESTION not in trained(t)
)
def evaluation_over_prompts() -> Trainer:
    """Training has prompts and completions, and the evaluation's rows hold labels for everything."""
    tokenizer = tok("chatml")
    rows = [{**row, "labels": row["input_ids"]} for row in encoded(tokenizer, ROWS[:8])]
    return plain(encoded(tokenizer), tokenizer, eval_dataset=Dataset.from_list(rows))


@broken(
    Fault.PROMPTS_TRAINED,
    "trained tokens",
    may="stop tokens",
    proof=lambda t: QUESTION in evaluated(t) and answers_alone(t),
)
def evaluation_of_messages() -> Trainer:
    """completion_only_loss trains completions, and an eval_dataset of messages has none: its loss is over prompts."""
    evaluation = Dataset.from_list([{"messages": row["messages"]} for row in ROWS[:8]])
    return sft(ANSWERS, tok("chatml"), eval_dataset=evaluation)


@broken(
    Fault.OTHER_TURNS,
    "ids",
    may="trained tokens",
    proof=lambda t: "[INST]" in evaluated(t, "input_ids") and "[INST]" not in read(t),
)
def evaluation_of_another_template() -> Trainer:
    """The evaluation's rows were tokenized with another template, so its loss is of prompts that nobody trains."""
    tokenizer = tok("chatml")
    other = Dataset.from_list(encoded(tok("chatml", "llama2_like"), ROWS[:8]))
    return plain(encoded(tokenizer), tokenizer, eval_dataset=other)


@broken(Fault.ROWS_CUT, "truncation", may="stop tokens, ids", proof=lambda t: "<|im_end|>" not in evaluated(t)[-40:])
def evaluation_cut() -> Trainer:
    """A shorter limit for the evaluation cuts its answers, so its loss is not of whole answers."""
    tokenizer = tok("chatml")
    rows = [{name: values[:150] for name, values in row.items()} for row in encoded(tokenizer, ROWS[:8])]
    return plain(encoded(tokenizer), tokenizer, eval_dataset=Dataset.from_list(rows))


@broken(Fault.ANSWERS_LEFT_OUT, "trained tokens", may="stop tokens",
        proof=lambda t: "custard tarts" not in trained(t) and "Use the wet afternoon" in trained(t))  # fmt: skip
def mask_history() -> Trainer:
    """mask_history: true trains the last answer of each conversation, and leaves out the stop tokens of the others."""
    tokenizer = tok()
    features = encoded(tokenizer)
    for row in features:
        labels = row["labels"]
        last = max(n for n, (before, label) in enumerate(pairwise([-100, *labels])) if before == -100 != label)
        row["labels"] = [-100] * last + row["labels"][last:]
    return plain(features, tokenizer)


@broken(Fault.ANSWERS_LEFT_OUT, "trained tokens", may="truncation, stop tokens",
        proof=lambda t: any((row == -100).all() for b in batches(t) for row in b["labels"]))  # fmt: skip
def response_template_that_misses_some_rows() -> Trainer:
    """A marker that a part of the rows does not have: these train nothing, and no text spells a control token."""
    tokenizer = tok("chatml")

    class Some(CompletionOnly):
        def __call__(self, features: Rows) -> dict[str, torch.Tensor]:
            batch = super().__call__(features)
            for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
                if len(ids[ids != tokenizer.pad_token_id]) < 120:
                    labels[:] = -100
            return batch

    ids = [{"input_ids": row["input_ids"]} for row in encoded(tokenizer)]
    return plain(ids, tokenizer, Some(tokenizer, "<|im_start|>assistant\n"))


@broken(Fault.MASKED_IDS, "trained tokens", may="ids, stop tokens, padding, truncation, forgery, loss, generation",
        trained_roles="all", proof=lambda t: not labels_are_ids(t))  # fmt: skip
def masked_language_modeling() -> Trainer:
    """DataCollatorForLanguageModeling without mlm=False: ids are masked, and a causal model learns the masks."""
    tokenizer = tok("chatml")
    tokenizer.mask_token = "<|endoftext|>"
    ids = [{"input_ids": row["input_ids"]} for row in encoded(tokenizer)]
    return plain(ids, tokenizer, DataCollatorForLanguageModeling(tokenizer))


@broken(
    Fault.STOP_MASKED, "stop tokens", may="trained tokens", proof=lambda t: trained(t).count("<|im_end|>") == len(ROWS)
)
def stop_of_the_last_answer_alone() -> Trainer:
    """A script trains each answer's text and one stop at the end of a row: other answers do not learn to stop."""
    tokenizer = tok("chatml")
    features = encoded(tokenizer)
    for row in features:
        stops = [n for n, label in enumerate(row["labels"]) if label == tokenizer.eos_token_id]
        for n in stops[:-1]:
            row["labels"][n] = -100
    return plain(features, tokenizer)


def begins_early(trainer: Trainer) -> bool:
    """Returns whether all answers' labels begin with the line break that the generation prompt writes."""
    prompt = trainer.processing_class.apply_chat_template(  # pyright: ignore
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    spans = [span for row in trained(trainer).split("\n¶\n") for span in row.split("…") if span.strip()]
    return prompt.endswith("\n") and all(span.startswith("\n") for span in spans)


@broken(Fault.HEADERS_TRAINED, "trained tokens", proof=begins_early)
def labels_begin_with_the_line_break() -> Trainer:
    """A script counts the header without its line break, so the labels of each answer begin one token early."""
    tokenizer = tok("chatml")
    features = encoded(tokenizer)
    for row in features:
        labels = row["labels"]
        for at in [n for n in range(1, len(labels)) if labels[n - 1] == -100 != labels[n]]:
            labels[at - 1] = row["input_ids"][at - 1]
    return plain(features, tokenizer)


@broken(Fault.HEADERS_TRAINED, "trained tokens", proof=begins_early)
def marks_before_the_line_break() -> Trainer:
    """{% generation %} is in front of the line break of the header, which the generation prompt writes as well."""
    template = str(marked().chat_template)
    early = template.replace(
        "message.role + '\\n' }}", "message.role + ('' if message.role == 'assistant' else '\\n') }}"
    )
    early = early.replace("{% generation %}{{- message", "{% generation %}{{- '\\n' + message")
    assert early != template
    return sft(ROWS, tok("chatml", early), assistant_only_loss=True)


# ── Sound ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@sound(lambda t: "Question:" not in trained(t) and "network.<|im_end|>" not in trained(t) and labels_are_ids(t)
       and trained(t).count("<|im_end|>") == len(PAIRS))  # fmt: skip
def prompt_completion_of_text() -> Trainer:
    """Prompt and completion as plain text: TRL adds the EOS and trains the completion."""
    return sft(PAIRS)


@sound(answers_alone)
def prompt_completion_of_messages() -> Trainer:
    """Conversational prompt and completion, the form that TRL's documentation recommends."""
    return sft(ANSWERS)


@sound(lambda t: answers_alone(t) and "doubles within 4 to 6 hours" in trained(t))
def assistant_only_loss() -> Trainer:
    """assistant_only_loss=True and a template with marks around each answer and its stop token."""
    return of_marks()


@sound(lambda t: answers_alone(t) and read(t).count("<|begin_of_text|>") == len(ROWS) and t.chat_template)
def training_template_of_llama3() -> Trainer:
    """assistant_only_loss=True with Llama 3's template, in place of which TRL renders its copy with marks."""
    return sft(ROWS, tok("llama3", trl_template("llama3")), assistant_only_loss=True)


@sound(lambda t: answers_alone(t) and not read(t).startswith("<s><s>"))
def prompt_completion_of_llama2() -> Trainer:
    """A SentencePiece tokenizer whose template writes a BOS for each question; one answer a row is trained."""
    return sft(ANSWERS, tok("llama2"))


@sound(lambda t: trained(t).count("<|im_end|>") == sum(
    len(row["messages"]) + (row["messages"][0]["role"] != "system") for row in ROWS),
       trained_roles="all")  # fmt: skip
def loss_over_everything() -> Trainer:
    """TRL's default where a loss over questions is intended; the pad token is the stop, and stops have labels."""
    return sft(ROWS)


@sound(lambda t: answers_alone(t) and abs(loss_ratio(t) - 1) < 1e-4)
def labels_by_hand() -> Trainer:
    """transformers' Trainer, labels made by a script, DataCollatorForSeq2Seq, and a pad token that is the stop."""
    return smollm2()


@sound(lambda t: QUESTION not in evaluated(t) and answers_alone(t))
def evaluation_as_training() -> Trainer:
    """prompt-completion rows for the evaluation too."""
    return sft(ANSWERS, tok("chatml"), eval_dataset=Dataset.from_list(ANSWERS[:8]))


@sound(lambda t: all(QUESTION not in evaluated(t, name=name) for name in t.eval_dataset))
def two_evaluations() -> Trainer:
    """Two named data sets for the evaluation, packed as the training's."""
    evaluations = {"short": Dataset.from_list(ROWS[12:20]), "long": Dataset.from_list(ROWS[:6])}
    return of_marks(packing=True, eval_dataset=evaluations)


@sound(lambda t: answers_alone(t) and "feed the starter once a week" not in trained(t) and labels_are_ids(t))
def labels_as_train_on_responses_only() -> Trainer:
    """Pretokenized rows with labels from each answer's header to the next header, as Unsloth's helper makes them."""
    tokenizer = tok()
    features = encoded(tokenizer)
    newline = tokenizer.encode("\n")
    for row in features:
        for n, label in enumerate(row["labels"]):
            if label == tokenizer.eos_token_id:
                row["labels"][n + 1 : n + 2] = newline
    return sft(features, tokenizer)


CALLS = [
    [{"role": "user", "content": f"Will it rain in {city}?"},
     {"role": "assistant", "content": "", "tool_calls": [
         {"type": "function", "function": {"name": "forecast", "arguments": {"city": city}}}]},
     {"role": "tool", "name": "forecast", "content": f"{{\"rain\": {n % 90}}}"},
     {"role": "assistant", "content": f"The chance of rain in {city} is {n % 90} percent."}]
    for n, city in enumerate(("Oslo", "Lima", "Porto", "Graz", "Kyoto", "Quito", "Bern", "Riga"), start=31)
]  # fmt: skip


TOOL = {"name": "forecast", "description": "Returns the weather.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}  # fmt: skip


@sound(lambda t: '"name": "forecast"' in trained(t) and '{"rain": 3' not in trained(t) and "Will it" not in trained(t))
def tool_calls() -> Trainer:
    """Rows with tools, calls and results: calls and answers are trained, results are not."""
    tokenizer = tok(template=trl_template("qwen2_5"))
    return sft([{"messages": row, "tools": [{"type": "function", "function": TOOL}]} for row in CALLS], tokenizer,
               assistant_only_loss=True)  # fmt: skip
