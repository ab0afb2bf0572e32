"""A zoo of broken and sound trainers of TRL, transformers and peft, for verify_trainer.

    python -m tests.sftcheck.trainer_zoo                   # prints one line for each set-up
    python -m tests.sftcheck.trainer_zoo --only NAME ...
    python -m tests.sftcheck.trainer_zoo --prove           # measures that each is what it claims, without sftron

Each set-up is a function that returns the trainer; its docstring says what is wrong and how it comes about. A broken
one names the fault that the report must find, the rows that must FAIL (`a|b`: one of the two), and those that may fail
as a consequence. `proof` is a measurement of zoo_proofs.py, which shares no code with sftron.
"""

import argparse
import logging
import sys
import time
import traceback
import warnings

import transformers
from datasets import disable_progress_bars

# They add their set-ups to ZOO.
import tests.sftcheck.documented_examples
import tests.sftcheck.zoo_labels
import tests.sftcheck.zoo_packing
import tests.sftcheck.zoo_texts
import tests.sftcheck.zoo_training  # noqa: F401
from tests.sftcheck.set_up import SetUp
from tests.sftcheck.zoo_materials import ZOO


def hush() -> None:
    warnings.simplefilter("ignore")
    disable_progress_bars()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)


def run(set_up: SetUp, prove: bool) -> str:
    """Verifies or proves one set-up; returns its line, which begins with "ok" if it is as expected."""
    started = time.monotonic()
    expected = ", ".join(set_up.fails) or "sound"
    try:
        trainer = set_up.make()
        if prove:
            failed, problem = "", "" if set_up.proof(trainer) else "the proof does not hold"
        else:
            from sftron import verify_trainer  # not needed for --prove

            report = verify_trainer(trainer, **set_up.arguments)
            failed = ", ".join(row.name for row in report.checks if row.status == "FAIL") or "nothing"
            problem = set_up.problem(report)
    except Exception as error:
        if "--trace" in sys.argv:
            traceback.print_exc()
        failed, problem = "raised", f"{type(error).__name__}: {error}".splitlines()[0][:160]
    seconds = time.monotonic() - started
    verdict = f"NOT as expected: {problem}" if problem else "as expected"
    return f"{'ok' if not problem else '!!'} {set_up.name:34} {expected:38} {failed:38} {seconds:5.1f} s  {verdict}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(ZOO), choices=list(ZOO), metavar="NAME")
    parser.add_argument("--prove", action="store_true", help="run the proofs instead of verify_trainer")
    parser.add_argument("--trace", action="store_true", help="print tracebacks")
    chosen = parser.parse_args()
    hush()
    lines = []
    for name in chosen.only:
        lines.append(run(ZOO[name], chosen.prove))
        print(lines[-1], flush=True)
    wrong = sum(line.startswith("!!") for line in lines)
    print(f"{len(lines)} set-ups, {len(lines) - wrong} as expected, {wrong} not")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
