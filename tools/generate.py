"""Chats with a trained model in the terminal:

    python tools/generate.py --model runs/quickstart/latest                     an exported folder
    python tools/generate.py --model runs/my-run/checkpoints/step-1000          a checkpoint
    python tools/generate.py --model runs/my-run --temperature 0.7 --top-p 0.9  what is newest in a run directory
    echo "What is Fernwick?" | python tools/generate.py --model runs/quickstart

Ctrl-C stops an answer, /reset forgets the conversation, Ctrl-D ends. What is piped in is one question.
Exit status: 0, or 2 where the model cannot be opened, a question not be asked, or --json not be written.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from sftron.config.errors import exit_with, refuse, show
from sftron.models.generation import Sampler
from sftron.train.chat import Chat, open_chat_model


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="generate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="an export, checkpoint or run directory"
    )
    parser.add_argument("--prompt", action="append", default=[], help="ask this and end; again for the next turn")
    parser.add_argument("--system", help="the system message")
    parser.add_argument("--max-new-tokens", type=_positive, default=512, metavar="N", help="of an answer (%(default)s)")
    parser.add_argument("--temperature", type=_not_negative, default=0.0, metavar="T", help="0, the default, is greedy")
    parser.add_argument("--top-p", type=_share, default=1.0, metavar="P", help="with a temperature (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="with a temperature (%(default)s)")
    dtypes = ["float32", "bfloat16"]
    parser.add_argument("--dtype", choices=dtypes, default=dtypes[on_gpu], help="to compute in (%(default)s)")
    parser.add_argument("--device", type=_device, default="cuda" if on_gpu else "cpu", help="%(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the conversation there at the end")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _not_negative(text: str) -> float:
    if not 0 <= float(text) < float("inf"):
        raise ValueError
    return float(text)


def _share(text: str) -> float:
    if not 0 < float(text) <= 1:
        raise ValueError
    return float(text)


def _device(text: str) -> torch.device:
    try:
        return torch.empty(0, device=text).device
    except (RuntimeError, AssertionError) as error:  # torch has either for a device that is not there
        raise argparse.ArgumentTypeError(f"{text}: {str(error).splitlines()[0]}") from error


def say_answer(chat: Chat, question: str) -> None:
    """Raises ValueError where the question cannot be asked."""
    if not question.strip():
        raise ValueError("the question is empty; give it by --prompt or on standard input")
    is_terminal = sys.stdout.isatty()
    for part in chat.ask(question.encode("utf-8", "replace").decode()):
        if is_terminal:
            show(part, end="")
        else:
            print(part, end="", flush=True)  # for a program, as it is
    show()
    if not chat.has_stopped:
        show("[cut off: --max-new-tokens, or the model's positions]", to=sys.stderr)


def talk(chat: Chat) -> None:
    """Until Ctrl-D."""
    show("Ctrl-C stops an answer, /reset forgets the conversation, Ctrl-D ends.", to=sys.stderr)
    while True:
        try:
            question = input("\n> ").strip()
            if question == "/reset":
                chat.reset()
                show("forgotten", to=sys.stderr)
            elif question:
                say_answer(chat, question)
        except ValueError as error:
            show(f"generate: {error}", to=sys.stderr)
        except KeyboardInterrupt:
            show()
        except EOFError:
            show()
            return


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    disable_progress_bar()
    try:
        opened = open_chat_model(options.model, dtype=getattr(torch, options.dtype), device=options.device)
        chat = Chat(
            opened,
            choose=Sampler(options.temperature, options.top_p, options.seed),
            max_new_tokens=options.max_new_tokens,
            system=options.system,
        )
        show(f"{opened.folder}, {options.dtype} on {options.device}", to=sys.stderr)
        if not options.prompt and sys.stdin.isatty():
            import readline  # noqa: F401  # input() then knows the arrow keys

            talk(chat)
        for question in options.prompt or ([] if sys.stdin.isatty() else [sys.stdin.read().strip()]):
            say_answer(chat, question)
    except (ValueError, OSError) as error:
        return refuse(error, "generate")
    if options.json:
        messages = [{"role": each.role.name.lower(), "content": each.content} for each in chat.messages]
        found = {"model": str(opened.folder), "messages": messages}
        try:
            options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            return refuse(error, "the conversation cannot be written")
    return 0


if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
