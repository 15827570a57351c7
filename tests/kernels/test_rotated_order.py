"""Rotated attention reads new keys behind a barrier, and angles before it waits for its inputs.

The interpreter does not show that. The kernels are compiled for a GPU that does not exist.
"""

import json
from collections.abc import Iterator

import pytest

from tests.support.script_server import ScriptServer, compiling_server

pytest.importorskip("triton")
BEGIN = """
import json, re
from benchmarks.exact_registers import CompiledKernels, new_pass
from benchmarks.rotated_registers import LayerShape, MODULES, run_layer

compiled = CompiledKernels(MODULES)

def instructions(exact):
    shape = LayerShape(8, 2, 64, 2)
    run_layer(shape, new_pass(1, 8, 0), exact, rotates=True)
    names = "griddepcontrol.wait|ld.global|st.global|bar.sync|cp.async.cg"
    return re.findall(names, compiled.kernels.pop().asm["ptx"])
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptServer]:
    with compiling_server(BEGIN) as started:
        yield started


@pytest.mark.parametrize("exact", [False, True])
def test_new_keys_are_stored_before_keys_are_read(server: ScriptServer, exact: bool) -> None:
    output = server.run(f"print(json.dumps(instructions({exact})))")
    names: list[str] = json.loads(output.splitlines()[-1])
    wait, first_key = names.index("griddepcontrol.wait"), names.index("cp.async.cg")
    stores = [i for i, name in enumerate(names[:first_key]) if name == "st.global"]
    barriers = [i for i, name in enumerate(names[:first_key]) if name == "bar.sync"]
    assert len(stores) == 2 and wait < stores[0]  # a key and a value
    assert stores[-1] < barriers[-1]
    early_loads = names[:wait].count("ld.global")
    assert early_loads > 3 + 2  # request, positions of queries and keys, and behind them angles
