"""Prints a script that completes the commands and the keys of the configuration in your shell:

    eval "$(sftron completion bash)"        # in ~/.bashrc
    eval "$(sftron completion zsh)"         # in ~/.zshrc

Exit status: 0 printed; 2 the shell is not known.
"""

from pkgutil import iter_modules

from sftron import commands as package
from sftron.commands.arguments import make_parser
from sftron.errors import show

_BASH = """_sftron() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}"
    # Bash takes = for the end of a word.
    [[ "$word" == "=" ]] && return
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
    elif [[ "$word" == --* ]]; then
        compopt -o nospace
        COMPREPLY=($(compgen -W "{options}" -- "$word"))
    fi
}}
complete -o default -F _sftron sftron
"""


def main(arguments: list[str]) -> int:
    parser = make_parser("completion", __doc__)
    parser.add_argument("shell", choices=("bash", "zsh"))
    shell = parser.parse_args(arguments).shell
    from sftron.config.help import dotted_keys  # here, so that --help takes no time

    commands = sorted(
        each.name.replace("_", "-") for each in iter_modules(package.__path__) if each.name != "arguments"
    )
    options = " ".join(
        ["--config", "--dry-run", "--quiet", "--verbose", "--help", *(f"--{key}=" for key in dotted_keys())]
    )
    script = _BASH.format(commands=" ".join(commands), options=options)
    show(("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + script, end="")
    return 0
