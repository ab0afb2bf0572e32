"""Compares any runs:

    sftron compare runs/a runs/b --out comparison

Writes report.html, report.json and plots/*.png: the losses against tokens and time, speed, memory, and a table of final
figures. It averages runs that differ only in their seeds.

Exit status: 0 written, 2 a folder is not a run directory, or is given twice.
"""

from pathlib import Path

from sftron.commands.arguments import as_path, make_parser, refusing, write_report, writing
from sftron.errors import show


@refusing(ValueError, OSError, tool="sftron compare")
def main(arguments: list[str]) -> int:
    parser = make_parser("compare", __doc__)
    parser.add_argument("runs", type=as_path, nargs="+", metavar="RUN", help="run directories")
    parser.add_argument("--out", type=as_path, default=Path("comparison"), metavar="DIR", help="default: comparison")
    parser.add_argument("--title", default="Runs compared", help="title of the page")
    parser.add_argument("--json", type=as_path, metavar="FILE", help="also write report.json there")
    options = parser.parse_args(arguments)
    # Imported here, so that --help takes no time.
    from sftron.compare.comparison import compare
    from sftron.compare.recorded_run import read_run

    if len({folder.resolve() for folder in options.runs}) < len(options.runs):
        raise ValueError(f"{', '.join(map(str, options.runs))} has a run twice; give each run once")
    comparison = compare(options.title, [read_run(folder) for folder in options.runs])
    with writing(options.out):
        page = comparison.write(options.out)
    if options.json:
        write_report(options.json, comparison.as_json(), "--json")
    show(f"{comparison.as_text()}\n\nreport     {page}")
    return 0
