"""`import peagle` sets OMP_WAIT_POLICY, so that idle threads of PyTorch sleep."""

import os
import subprocess
import sys

import pytest

from peagle.openmp import SPIN_VARIABLES, avoid_spinning


def test_threads_sleep_by_default() -> None:
    environment: dict[str, str] = {}
    avoid_spinning(environment)
    assert environment == {"OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.parametrize("name", SPIN_VARIABLES)
def test_variables_of_the_user_are_kept(name: str) -> None:
    environment = {name: "active"}
    avoid_spinning(environment)
    assert environment == {name: "active"}


def test_the_variable_is_set_before_torch_is_imported() -> None:
    kept = {name: text for name, text in os.environ.items() if name not in SPIN_VARIABLES}
    program = "import os, sys, peagle; print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'])"
    done = subprocess.run(
        [sys.executable, "-c", program], env=kept, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "PASSIVE"]
