"""`make fuzz`: run random cases for some minutes, and print the first failure as a test."""

import argparse
import sys
import time
import traceback

import torch

from peagle.errors import UserError
from tests.support.fuzzing.case import FuzzCase, as_test
from tests.support.fuzzing.draw import draw_case
from tests.support.fuzzing.run import FuzzCounts, run_case
from tests.support.fuzzing.shrink import shrink

PROGRESS_SECONDS = 10.0


def fails(case: FuzzCase) -> bool:
    try:
        run_case(case)
    except UserError:  # A smaller case may be one that the engine refuses.
        return False
    except Exception:
        return True
    return False


def report_failure(case: FuzzCase, seed: int, number: int, error: Exception) -> None:
    traceback.print_exception(error)
    print(f"\nCase {number} of seed {seed} fails: {error}\nLooking for a smaller one ...")
    sys.stdout.flush()
    if not any(fails(case) for _ in range(3)):
        print("It does not fail again in three runs: adaptive drafting measures times.")
    small = shrink(case, fails)
    print(f"As a test (seed {seed}, case {number}):\n")
    print(as_test(small, f"fuzz_{seed}_{number}"))


def run_cases(seed: int, minutes: float, first: int) -> int:
    """Returns the exit status: 1 after a failure."""
    started = time.monotonic()
    reported = started
    counts = FuzzCounts()
    number = first
    while (now := time.monotonic()) < started + 60 * minutes:
        if now > reported + PROGRESS_SECONDS:
            print(f"{now - started:5.0f} s: {counts}", flush=True)
            reported = now
        case = draw_case(seed, number)
        try:
            counts += run_case(case)
        except Exception as error:
            print(f"{now - started:5.0f} s: {counts}")
            report_failure(case, seed, number, error)
            return 1
        number += 1
    print(f"Seed {seed}, no mismatch: {counts}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.fuzzing", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    options = parser.parse_args()
    torch.set_num_threads(1)  # Matrices are too small for a second thread.
    return run_cases(options.seed, options.minutes, options.first)


if __name__ == "__main__":
    sys.exit(main())
