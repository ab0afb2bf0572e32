#!/usr/bin/env python
"""Kill a run of two ranks at random, again and again, and let another hop between 1, 2 and 4 ranks, of which none, 2 or
4 share each pack; exit 1 unless each is the run that was left alone:
`python tools/chaos.py [--kills 25] [--hops 10] [--lora] [--seed 0] [--folder DIR]`.

Needs the repository (its tests make the model and the rows), no GPU, and ten minutes on two cores.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from sftron.errors import exit_with

sys.path.insert(0, str(Path(__file__).parents[1]))


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25, metavar="N")
    parser.add_argument("--hops", type=int, default=10, metavar="N")
    parser.add_argument("--lora", action="store_true", help="train adapters (lora.rank 4) instead of all weights")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the instants")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep the runs and what they said here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there too")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    from tests.train.chaos import Chaos, start_torchrun

    options = parse_arguments(arguments)
    with tempfile.TemporaryDirectory() as folder:
        keys = {"lora__rank": 4} if options.lora else {}
        chaos = Chaos(options.folder or Path(folder), start_torchrun, options.seed, report=print, options=keys)
        chaos.kill(options.kills)
        if options.hops:
            chaos.hop(options.hops)
    for violation in chaos.violations:
        print(f"VIOLATED  {violation}")
    print(f"{options.kills} kills, {options.hops} hops: {len(chaos.violations) or 'nothing'} violated")
    if options.json:
        found = {"kills": options.kills, "hops": options.hops, "table": chaos.table, "violations": chaos.violations}
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 1 if chaos.violations else 0


if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
