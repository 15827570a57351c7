"""How PyTorch's OpenMP threads wait.

By default they spin for milliseconds after each operation. Meanwhile the threads of the C kernels,
or another process, need the core: decoding then takes several times as long.
"""

from collections.abc import MutableMapping

WAIT_POLICY = "OMP_WAIT_POLICY"
SPIN_VARIABLES = (WAIT_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def avoid_spinning(environment: MutableMapping[str, str]) -> None:
    """Let waiting threads sleep. The runtime reads the environment when torch is imported.

    A user who has set how threads wait keeps that.
    """
    if not any(name in environment for name in SPIN_VARIABLES):
        environment[WAIT_POLICY] = "PASSIVE"
