"""Chats with a trained model in the terminal:

    sftron generate --model runs/quickstart/latest                     an exported folder
    sftron generate --model runs/my-run/checkpoints/step-1000          a checkpoint
    sftron generate --model runs/my-run --temperature 0.7 --top-p 0.9  the newest weights of a run directory
    echo "What is Fernwick?" | sftron generate --model runs/quickstart

Ctrl-C stops an answer, /reset forgets the conversation, Ctrl-D ends. Piped input is one question.
Exit status: 0, or 2 if the model cannot be opened, a question is refused, or --json cannot be written.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from sftron.commands.arguments import as_path, device, make_parser, positive, refusing, write_json
from sftron.errors import show

if TYPE_CHECKING:
    from sftron.train.chat import Chat


def show_answer(chat: Chat, question: str) -> None:
    """Prints the answer as it is generated. Raises ValueError if the question is empty or refused."""
    is_terminal = sys.stdout.isatty()
    for part in chat.ask(question.encode("utf-8", "replace").decode()):
        if is_terminal:
            show(part, end="")
        else:
            print(part, end="", flush=True)  # unchanged, for another program
    show()
    if not chat.has_stopped:
        show("[cut off: --max-new-tokens, or the model's positions]", to=sys.stderr)


def chat_until_end(chat: Chat) -> None:
    """Reads questions from the terminal and prints the answers, until Ctrl-D."""
    show("Ctrl-C stops an answer, /reset forgets the conversation, Ctrl-D ends.", to=sys.stderr)
    while True:
        try:
            question = input("\n> ").strip()
            if question == "/reset":
                chat.reset()
                show("conversation cleared", to=sys.stderr)
            elif question:
                show_answer(chat, question)
        except ValueError as error:
            show(f"generate: {error}", to=sys.stderr)
        except KeyboardInterrupt:
            show()
        except EOFError:
            show()
            return


@refusing(ValueError, OSError, tool="sftron generate")
def main(arguments: list[str]) -> int:
    parser = make_parser("generate", __doc__)
    add = parser.add_argument
    add("--model", type=as_path, required=True, metavar="DIR", help="an export, checkpoint or run directory")
    add("--prompt", action="append", default=[], help="ask this and end; repeat it for further turns")
    add("--system", help="the system message")
    add("--max-new-tokens", type=positive, default=512, metavar="N", help="limit of an answer (%(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    add("--top-p", type=float, default=1.0, metavar="P", help="with a temperature (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="with a temperature (%(default)s)")
    add("--dtype", choices=["float32", "bfloat16"], help="the type to compute in (bfloat16 on a GPU, else float32)")
    add("--device", type=device, help="where to compute (cuda if a GPU is present, else cpu)")
    add("--json", type=as_path, metavar="FILE", help="write the conversation there at the end")
    options = parser.parse_args(arguments)
    # Imported here, so that --help takes no time.
    import torch
    from transformers.utils.logging import disable_progress_bar

    from sftron.models.generation import Sampler
    from sftron.train.chat import open_chat

    disable_progress_bar()
    chat = open_chat(
        options.model,
        system=options.system,
        max_new_tokens=options.max_new_tokens,
        sampler=Sampler(options.temperature, options.top_p, options.seed),
        dtype=getattr(torch, options.dtype) if options.dtype else None,
        device=options.device,
    )
    weights = chat.opened.model.head_weight
    show(f"{chat.opened.folder}, {str(weights.dtype).removeprefix('torch.')} on {weights.device}", to=sys.stderr)
    if not options.prompt and sys.stdin.isatty():
        import readline  # noqa: F401  # makes input() support the arrow keys

        chat_until_end(chat)
    for question in options.prompt or ([] if sys.stdin.isatty() else [sys.stdin.read().strip()]):
        show_answer(chat, question)
    messages = [{"role": each.role.name.lower(), "content": each.content} for each in chat.messages]
    write_json(options.json, {"model": str(chat.opened.folder), "messages": messages})
    return 0
