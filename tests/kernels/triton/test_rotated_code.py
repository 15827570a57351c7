"""Generated code of kernels that apply RoPE, compiled for a GPU that does not exist.

The products of a rotation are rounded before they are added. If a compiler fuses one of them with
the sum, keys have different bits in rope_store and in attention that rotates its rows.

Rotated attention reads new keys after a barrier, and angles before it waits for its inputs. The
interpreter cannot verify this order.
"""

import json
from collections.abc import Iterator

import pytest

from tests.support.script_server import ScriptServer, compiling_server

pytest.importorskip("triton")
BEGIN = """
import json, re
import torch
from benchmarks.kernels.exact_registers import CompiledKernels, new_pass
from benchmarks.kernels.rotated_registers import LayerShape, MODULES, run_layer
from peagle.kernels.attention_params import AttentionHeads
from peagle.kernels.triton.attention import rope_store

compiled = CompiledKernels((*MODULES, rope_store))

def rotate_rows(dtype, partial_sums):
    qkv = torch.empty(8, 12 * 64, dtype=dtype)
    if partial_sums:
        qkv = torch.empty(2, *qkv.shape)
    cache, table = torch.empty(64, 2, 64, dtype=dtype), torch.empty(4096, 64)
    heads = AttentionHeads(8, 2)
    rope_store.rope_store(qkv, new_pass(1, 8, 0), table, cache, cache.clone(), heads)

def attend(exact, partial_sums, depth=0):
    run_layer(LayerShape(8, 2, 64, 2 if partial_sums else 1), new_pass(1, 8, depth), exact, True)

def products():
    # The type of each fma instruction, and what it adds.
    text = compiled.kernels.pop().asm["ptx"]
    return re.findall(r"fma\\.rn\\.(\\w+)\\s.*, (\\S+);", text)

def instructions():
    names = "griddepcontrol.wait|ld.global|st.global|bar.sync|cp.async.cg"
    return re.findall(names, compiled.kernels.pop().asm["ptx"])
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptServer]:
    with compiling_server(BEGIN) as started:
        yield started


def products_of(server: ScriptServer, call: str) -> list[list[str]]:
    output = server.run(f"{call}\nprint(json.dumps(products()))")
    found: list[list[str]] = json.loads(output.splitlines()[-1])
    return found


@pytest.mark.parametrize("partial_sums", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rope_store(server: ScriptServer, dtype: str, partial_sums: bool) -> None:
    found = products_of(server, f"rotate_rows(torch.{dtype}, {partial_sums})")
    assert found and all(product == ["f32", "0f00000000"] for product in found)


@pytest.mark.parametrize("partial_sums", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_rotated_attention(server: ScriptServer, exact: bool, partial_sums: bool) -> None:
    found = products_of(server, f"attend({exact}, {partial_sums})")
    assert ["f32", "0f00000000"] in found
    # The sum of a softmax may be fused, and is in float32, too.
    assert all(dtype == "f32" for dtype, _ in found)


@pytest.mark.parametrize(
    "arguments",
    ["False, True", "True, True", pytest.param("True, True, depth=4", marks=pytest.mark.slow)],
)
def test_new_keys_are_stored_before_keys_are_read(server: ScriptServer, arguments: str) -> None:
    output = server.run(f"attend({arguments})\nprint(json.dumps(instructions()))")
    names: list[str] = json.loads(output.splitlines()[-1])
    wait = names.index("griddepcontrol.wait")
    key, value = [i for i, name in enumerate(names) if name == "st.global"][:2]
    assert wait < key
    behind = names[value + 1 :]
    reads = [i for i, name in enumerate(behind) if name in ("ld.global", "cp.async.cg")]
    assert behind.index("bar.sync") < reads[0]
    assert "cp.async.cg" not in names[:value]
    early_loads = names[:wait].count("ld.global")
    assert early_loads > 3 + 2  # request, positions of queries and keys, and then angles
