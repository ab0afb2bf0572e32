"""Set-ups of the zoo: ms-swift's logits_to_keep, masks that begin early, a loss without a shift, a doubled template."""

from typing import Any

from torch.nn.functional import pad
from transformers import Trainer

from tests.verify.found_set_ups import loss_of_each_token_itself
from tests.verify.zoo_materials import ROWS, Rows, broken, encoded, marked, model, plain, sft, sound, tok
from tests.verify.zoo_proofs import answers_alone, arguments_of_model, gradient_behind_labels, loss_ratio, read, trained


class KeepsLogits(Trainer):
    """`_prepare_inputs` and `prepare_logits_to_keep` of ms-swift 4.6, which is not installed for the tests.

    It needs older versions of transformers and TRL.
    """

    num_more = 1

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        labels = inputs["labels"]
        if labels.shape[0] == 1:
            loss_mask = (labels != -100)[0]
            labels = pad(labels[:, loss_mask], (1, 0), value=-100)
            logits_to_keep: Any = pad(loss_mask[1:], (0, 1), value=True)
        else:
            logits_to_keep = labels.shape[-1] - ((labels != -100).int().argmax(-1).min().item()) + self.num_more
            labels = labels[:, -logits_to_keep:]
        return {**inputs, "labels": labels, "logits_to_keep": logits_to_keep}


class KeepsOneLogitLess(KeepsLogits):
    num_more = 0


def keeps_logits(trainer: Trainer) -> bool:
    return "logits_to_keep" in arguments_of_model(trainer) and abs(loss_ratio(trainer) - 1) < 1e-4


@sound(lambda t: keeps_logits(t) and answers_alone(t))
def logits_to_keep() -> Trainer:
    """ms-swift passes labels of the end of the rows alone, and as many logits (use_logits_to_keep, its default)."""
    tokenizer = tok("chatml")
    return plain(encoded(tokenizer), tokenizer, trainer=KeepsLogits, gradient_accumulation_steps=2)


@sound(lambda t: keeps_logits(t) and answers_alone(t))
def logits_to_keep_of_single_rows() -> Trainer:
    """With one row a batch, ms-swift passes a mask of the logits that predict labels."""
    tokenizer = tok("chatml")
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    return plain(encoded(tokenizer), tokenizer, trainer=KeepsLogits, **options)


@broken("loss", proof=lambda t: "logits_to_keep" in arguments_of_model(t) and abs(loss_ratio(t) - 1) > 1e-3)
def logits_to_keep_is_one_less() -> Trainer:
    """One logit less is kept, so the first token of an answer in each batch is not trained, and it is counted."""
    tokenizer = tok("chatml")
    return plain(encoded(tokenizer), tokenizer, trainer=KeepsOneLogitLess, gradient_accumulation_steps=2)


def begins_early(trainer: Trainer) -> bool:
    """Returns whether all answers' labels begin with the line break that the generation prompt writes."""
    prompt = trainer.processing_class.apply_chat_template(  # pyright: ignore
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    spans = [span for row in trained(trainer).split("\n¶\n") for span in row.split("…") if span.strip()]
    return prompt.endswith("\n") and all(span.startswith("\n") for span in spans)


@broken("trained tokens", proof=begins_early)
def labels_begin_with_the_line_break() -> Trainer:
    """A script counts the header without its line break, so the labels of each answer begin one token early."""
    tokenizer = tok("chatml")
    features = encoded(tokenizer)
    for row in features:
        labels = row["labels"]
        for at in [n for n in range(1, len(labels)) if labels[n - 1] == -100 != labels[n]]:
            labels[at - 1] = row["input_ids"][at - 1]
    return plain(features, tokenizer)


@broken("trained tokens", proof=begins_early)
def marks_before_the_line_break() -> Trainer:
    """{% generation %} is in front of the line break of the header, which the generation prompt writes as well."""
    template = str(marked().chat_template)
    early = template.replace(
        "message.role + '\\n' }}", "message.role + ('' if message.role == 'assistant' else '\\n') }}"
    )
    early = early.replace("{% generation %}{{- message", "{% generation %}{{- '\\n' + message")
    assert early != template
    return sft(ROWS, tok("chatml", early), assistant_only_loss=True)


@broken("loss", proof=lambda t: abs(loss_ratio(t) - 1) < 1e-4 and gradient_behind_labels(t) > 0)
def loss_without_shift_of_an_untrained_model() -> Trainer:
    """Each token learns to repeat itself, and the loss of a new model is the logarithm of its vocabulary anyway."""
    tokenizer = tok("chatml")
    return plain(encoded(tokenizer), tokenizer, their_model=model(tokenizer, initializer_range=1e-4),
                 compute_loss_func=loss_of_each_token_itself)  # fmt: skip


def rendered_in_a_message(tokenizer: Any) -> Rows:
    """Conversations whose prompt is rendered already, and is the text of their first message."""
    rows = []
    for row in ROWS:
        *prompt, answer = row["messages"]
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        rows.append({"messages": [{"role": "user", "content": text}, answer]})
    return rows


def starts_twice(trainer: Trainer) -> bool:
    rows = read(trainer).split("\n¶\n")
    return len(rows) == len(ROWS) and all("<|im_start|>user\n<|im_start|>system\n" in row for row in rows)


@broken("ids", proof=starts_twice)
def template_applied_twice() -> Trainer:
    """Prompts that were rendered once are rendered again, as the text of a user, and only ids are left of them."""
    tokenizer = tok()
    return plain(encoded(tokenizer, rendered_in_a_message(tokenizer)), tokenizer)


@broken("ids", proof=starts_twice)
def template_applied_twice_by_trl() -> Trainer:
    """The same with TRL's prompt and completion, whose rows still have their messages."""
    rows = [row["messages"] for row in rendered_in_a_message(tok())]
    return sft([{"prompt": row[:-1], "completion": row[-1:]} for row in rows])
