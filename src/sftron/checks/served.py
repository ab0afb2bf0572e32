"""Comparison of an export with its server: prompt ids, greedy answers, and where answers stop (laws 1, 2 and 9).

Templates and stop tokens are where served answers differ from trained ones. The folder's own template renders the
prompts and LlamaForSFT answers them in fp32; servers.py requests the answers of the server, or of the GGUF file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sftron.checkpoint.hf_weights import load_model
from sftron.checkpoint.model_folder import read_config, read_json, stop_ids_of
from sftron.checks.parity import BF16_SLACK, FP32_TOLERANCE, Ids, Prompt, native_logits, parity_report
from sftron.checks.report import Check, Report
from sftron.checks.servers import ServedAnswer, open_served
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.types import Message, Role
from sftron.models.generation import greedy_generate
from sftron.models.llama import LlamaForSFT, attention_of_layers
from sftron.visible_text import counted

QUANTIZED_BOUND = 1.0
"""Where a quantized file's answer diverges from the weights', its token may be at most this much less likely, in nats,
so the model might have chosen it. Answers to another prompt, or from another model, diverge by more."""


@dataclass(frozen=True, slots=True)
class _Compared:
    """The answers to one prompt, without their stop tokens; `own` is the native model's."""

    prompt_ids: Ids
    own: Ids
    own_stop: int | None
    served: ServedAnswer
    num_equal: int
    """The number of equal leading tokens."""
    served_next: Ids
    """The next served token, in a list; empty if the answer has ended."""
    gap: float = 0.0
    """Where they diverge, the native log probability of the own token (it may be the stop) minus the log probability of
    the served token. Infinite if both are the same token and only one answer ends there."""

    @property
    def has_same_prompt(self) -> bool:
        ids = self.served.prompt_ids
        return self.served.num_prompt_tokens == len(self.prompt_ids) if ids is None else ids == self.prompt_ids

    @property
    def part_at(self) -> str:
        """Where the answers diverge: at a token, at a served stop that comes too early or too late, or nowhere."""
        is_over = self.served.finish == "stop" and not self.served_next
        if self.num_equal < len(self.own):
            return "early stop" if is_over and self.has_same_prompt else "token"
        return "late stop" if self.own_stop is not None and not is_over else ""


def check_served(
    folder: Path,
    prompts: Sequence[Prompt],
    against: tuple[str, str],
    *,
    max_new_tokens: int = 24,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    served_model: str | None = None,
    timeout: float = 120.0,
) -> Report:
    """Compares the model in `folder` with its server.

    Args:
        prompts: The prompts; each side renders them with its own template.
        against: `("vllm", URL)`, `("vllm", folder)`, for which `vllm serve` is started, or `("gguf", file)`.
        max_new_tokens: The maximum length of each greedy answer.
        dtype: The type that the server computes in; it decides how close two tokens must be to count as a tie. By
            default bfloat16, or float32 for a server started here; a GGUF file states its own.
        served_model: The name of the model on a server that serves several.
        timeout: The seconds within which a server must complete each reply.

    Raises:
        ValueError: The folder or a prompt cannot be used, no server answers, or a reply is invalid.
    """
    device = device or torch.device("cpu")
    architecture = read_config(folder)
    chat = ChatTokenizer.from_pretrained(folder)
    prompt_ids = [chat.encode_prompt([_message(each) for each in prompt]) for prompt in prompts]
    num_positions = max(map(len, prompt_ids)) + max_new_tokens
    # The server comes first: if it does not answer, the weights need not be read; and a server started here has ended
    # and freed its memory by then.
    with open_served(
        against,
        num_positions=num_positions,
        max_positions=architecture.max_position_embeddings,
        vocab_size=architecture.vocab_size,
        dtype=dtype,
        served_model=served_model,
        timeout=timeout,
    ) as served:
        answers = [served.answer(prompt, max_new_tokens) for prompt in prompts]
    attention = attention_of_layers("auto", architecture, device, torch.float32)
    native = load_model(folder, attention=attention, compute_dtype=torch.float32).eval().to(device)
    native.check_positions(num_positions, is_generated=True)
    stop_ids = {*stop_ids_of(folder), *chat.stop_ids}
    with torch.inference_mode():
        compared = [
            _compare(native, chat, ids, answer, max_new_tokens, stop_ids)
            for ids, answer in zip(prompt_ids, answers, strict=True)
        ]
        served_dtype = served.dtype or dtype or torch.bfloat16
        bound = QUANTIZED_BOUND if served.is_quantized else _rounding(native, compared, served_dtype)
    checks = (
        _check_prompts(chat, compared),
        _check_answers(chat, compared, bound, served.is_quantized, _penalty(folder)),
        _check_stops(chat, compared, folder, stop_ids, max_new_tokens, bound),
    )
    return parity_report(f"{folder} against {served.name}", len(prompts), torch.float32, attention, checks)


def _message(message: dict[str, str]) -> Message:
    return Message(Role[message["role"].upper()], message["content"])


def _compare(
    native: LlamaForSFT,
    chat: ChatTokenizer,
    prompt_ids: Ids,
    served: ServedAnswer,
    max_new_tokens: int,
    stop_ids: Collection[int],
) -> _Compared:
    own = list(greedy_generate(native, prompt_ids, max_new_tokens, stop_ids).token_ids)
    own_stop = own.pop() if own[-1] in stop_ids else None
    if (theirs := served.token_ids) is None:
        num_equal, rest = _equal_text(chat, own, served.text)
    else:
        if served.finish == "stop" and theirs and theirs[-1] in stop_ids:
            theirs = theirs[:-1]
        num_equal = _num_common(own, theirs)
        rest = theirs[num_equal:]
    compared = _Compared(prompt_ids, own, own_stop, served, num_equal, rest[:1])
    if not compared.part_at:
        return compared
    (logits_TV,) = native_logits(native, [prompt_ids + own[:num_equal]])
    own_next, served_next = (*own, own_stop)[num_equal], compared.served_next or list(stop_ids)
    gap = math.inf if own_next in served_next else float(logits_TV[-1, own_next] - logits_TV[-1, served_next].max())
    return replace(compared, gap=gap)


def _equal_text(chat: ChatTokenizer, own: Ids, text: str) -> tuple[int, Ids]:
    """Returns how many leading tokens of `own` the served text has, and the ids of the rest of the text."""
    num_equal = max(n for n in range(len(own) + 1) if text.startswith(_text(chat, own[:n])))
    rest = text[len(_text(chat, own[:num_equal])) :]
    return num_equal, chat.tokenizer.encode(rest, add_special_tokens=False) if rest else []


def _num_common(a: Ids, b: Ids) -> int:
    return next((n for n, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))


def _text(chat: ChatTokenizer, ids: Ids) -> str:
    """Returns the text of ids as servers give it: no control tokens, and no bytes of an incomplete last character."""
    text = chat.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text).rstrip("\ufffd")


def _rounding(native: LlamaForSFT, compared: Sequence[_Compared], dtype: torch.dtype) -> float:
    """Returns how far apart two tokens may be for rounding in `dtype` to decide between them, in nats.

    It is BF16_SLACK times the largest change that computing in `dtype` causes in the margin of the best token,
    over all tokens of the answers.
    """
    if dtype == torch.float32:
        return 2 * FP32_TOLERANCE.logits
    documents = [each.prompt_ids + each.own for each in compared]
    exact = native_logits(native, documents)
    native.compute_dtype = dtype
    rounded = native_logits(native, documents)
    native.compute_dtype = torch.float32
    changes = []
    for each, exact_TV, rounded_TV in zip(compared, exact, rounded, strict=True):
        start = len(each.prompt_ids) - 1
        exact_TV, rounded_TV = exact_TV[start:], rounded_TV[start:]
        best_T2 = exact_TV.topk(2).indices
        (a_T, b_T), (c_T, d_T) = (logits_TV.gather(1, best_T2).unbind(1) for logits_TV in (exact_TV, rounded_TV))
        changes.append(((a_T - b_T) - (c_T - d_T)).abs().max())
    return BF16_SLACK * float(torch.stack(changes).max())


# -- the rows --------------------------------------------------------------------------------------------------------


def _check_prompts(chat: ChatTokenizer, compared: Sequence[_Compared]) -> Check:
    wrong = [(number, each) for number, each in enumerate(compared) if not each.has_same_prompt]
    by_length = "" if compared[0].served.prompt_ids is not None else " in length (the server gives no ids)"
    measured = f"{len(compared) - len(wrong)} of {len(compared)} equal{by_length} ({compared[0].served.source})"
    causes = [_cause(chat, each) for _, each in wrong]
    detail = tuple(f"prompt {number}: {what}" for (number, _), (what, _) in zip(wrong, causes, strict=True))
    return Check("prompt ids", not wrong, measured, "all", detail, remedy=causes[0][1] if causes else "")


_TEMPLATE = (
    "Its template is not the one in the folder's tokenizer_config.json or chat_template.jinja. Serve the folder's "
    "template, or convert the folder to GGUF again. A template that writes today's date differs every day."
)
_BOS = (
    "The template writes the BOS token, and the tokenizer adds it again. Set add_bos_token to false for serving "
    "(GGUF: tokenizer.ggml.add_bos_token), or remove the token from the server's own template."
)
_NO_BOS = "The folder's template writes a BOS token, but the served prompt has none. " + _TEMPLATE
_SAME_TEXT = (
    "A message spells a control token, which is text here and control there (law 3), or the tokenizers differ. "
    "Remove the message from --prompts, and serve the folder's own tokenizer."
)
_NO_PROMPT = "Its template or a server setting leaves out the generation prompt. Set add_generation_prompt."


def _cause(chat: ChatTokenizer, each: _Compared) -> tuple[str, str]:
    """Returns how the ids of a prompt differ, and the remedy."""
    own, theirs, bos = each.prompt_ids, each.served.prompt_ids, chat.tokenizer.bos_token_id
    if theirs is None:
        number = each.served.num_prompt_tokens
        what = f"{len(own)} ids here and {number} there"
        likely = _BOS if number == len(own) + 1 else _TEMPLATE
        return what, f"The server reports only the number of ids. {likely}"
    if theirs[1:] == own and theirs[0] == bos:
        return f"{'a second' if own[0] == bos else 'a'} BOS token ({bos}) comes first", _BOS
    if own[1:] == theirs and own[0] == bos:
        return f"no BOS token ({bos})", _NO_BOS
    if theirs == own[: len(theirs)]:
        return f"{_quoted(chat, own[len(theirs) :])} is missing at the end", _NO_PROMPT
    if chat.decode(own) == chat.decode(theirs):
        return "the same text, but different ids", _SAME_TEXT
    at = _num_common(own, theirs)
    return f"at id {at}: {_quoted(chat, own[at:])} here, {_quoted(chat, theirs[at:])} there", _TEMPLATE


def _quoted(chat: ChatTokenizer, ids: Ids) -> str:
    return json.dumps(chat.decode(ids[:12]), ensure_ascii=False) + ("..." if len(ids) > 12 else "")


def _check_answers(
    chat: ChatTokenizer, compared: Sequence[_Compared], bound: float, is_quantized: bool, penalty: str
) -> Check:
    """Compares the answers up to the stop. A different stop fails the next row, unless it is due to rounding."""
    apart = [each for each in compared if each.part_at == "token" or (each.part_at and each.gap <= bound)]
    wrong = [each for each in apart if not (each.has_same_prompt and each.gap <= bound)]
    measured = f"{len(compared) - len(apart)} of {len(compared)} equal"
    measured += f" ({sum(each.num_equal for each in compared)} of {sum(len(each.own) for each in compared)} tokens)"
    if apart:
        measured += f", apart by <= {max(each.gap for each in apart):.2g} nats"
    detail = []
    for each in wrong:
        here, there = _quoted(chat, each.own[each.num_equal :][:1]), _quoted(chat, each.served_next)
        where = f"prompt {compared.index(each)}, token {each.num_equal}"
        detail += [
            f"{where}: {here} here, {there} there, {each.gap:.2g} nats less likely",
            f"  here:  {json.dumps(_text(chat, each.own), ensure_ascii=False)}",
            f"  there: {json.dumps(each.served.text, ensure_ascii=False)}",
        ]
    remedy = "It serves other weights, or samples or penalizes tokens. Check the served model and --dtype." + penalty
    if any(each.served.finish == "length" and not each.served_next for each in wrong):
        remedy = "The server cuts answers off before --max-new-tokens; raise its limit."
    if any(not each.has_same_prompt for each in wrong):
        remedy = "The prompts differ: fix those first."
    allowed = f"all, or apart by <= {bound:.2g} nats" + (" (quantized)" if is_quantized else "")
    return Check("greedy answers", not wrong, measured, allowed, tuple(detail), remedy=remedy)


def _penalty(folder: Path) -> str:
    """Returns a sentence if generation_config.json makes servers answer non-greedily."""
    path = folder / "generation_config.json"
    penalty = read_json(path).get("repetition_penalty", 1.0) if path.exists() else 1.0
    return "" if penalty in (None, 1.0) else f" generation_config.json has repetition_penalty: {penalty}; remove it."


def _check_stops(
    chat: ChatTokenizer,
    compared: Sequence[_Compared],
    folder: Path,
    stop_ids: Collection[int],
    max_new_tokens: int,
    bound: float,
) -> Check:
    known = [each for each in compared if each.gap > bound or (not each.part_at and each.own_stop is not None)]
    known = [each for each in known if each.part_at != "token"]
    if not known:
        return Check(
            "stop", None, f"no equal answer ends within {counted(max_new_tokens, 'tokens')}; raise --max-new-tokens"
        )
    wrong = [each for each in known if each.part_at]
    detail = tuple(
        f"prompt {compared.index(each)}: "
        + (
            f"{_quoted(chat, [each.own_stop or 0])} ends it here, but it goes on there (finish: {each.served.finish})"
            if each.part_at == "late stop"
            else f"it ends after {counted(each.num_equal, 'tokens')} there, but goes on here"
        )
        for each in wrong
    )
    names = sorted({chat.decode([each.own_stop]) for each in known if each.own_stop is not None})
    measured = f"{len(known) - len(wrong)} of {len(known)} answers end alike"
    measured += f", at {', '.join(names)}" if names else ""
    stated = {*stop_ids_of(folder)}
    lacking = [token_id for token_id in chat.stop_ids if token_id not in stated]
    remedy = (
        f"generation_config.json of {folder} lacks {chat.decode(lacking)} {lacking} in eos_token_id: add it, then "
        "serve or convert the folder again."
        if lacking
        else f"The server does not stop at {sorted(stop_ids)}. Set its eos_token_id (GGUF: "
        "tokenizer.ggml.eos_token_id) as in generation_config.json; vLLM reads that file unless started with "
        "--generation-config vllm."
    )
    return Check("stop", not wrong, measured, "all", detail, remedy=remedy)
