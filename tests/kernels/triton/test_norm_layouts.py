"""The sum of an RMS norm has the same order for whole rows and for partial sums.

In exact mode, the input of add_norm and rope_store is a whole row (bf16) or partial sums
(float32), which need different kernels. Triton adds in the order of a tensor's layout, which it
derives from the loads. The scripts compile for a GPU that does not exist.
"""

import json
from collections.abc import Iterator

import pytest

from tests.support.script_server import ScriptServer, compiling_server

pytest.importorskip("triton")
BEGIN = """
import json, re
import torch
from triton.runtime.jit import JITFunction
from tests.support.kernels import fake_gpu
fake_gpu.set_active()
from peagle.kernels.attention_params import AttentionHeads
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton import add_norm
from peagle.kernels.triton.attention import rope_store

compiled = []
compile_kernel = JITFunction.run
def run(function, *args, grid, warmup, **options):
    compiled.append(compile_kernel(function, *args, grid=grid, warmup=True, **options))
JITFunction.run = run
for module in (add_norm, rope_store):
    module.uses_triton = lambda x: True
    module.launch_options = lambda x: {"DEPENDENT": True, "launch_pdl": True}

def product(splits, rows, n):
    if splits == 1:
        return torch.empty(rows, n, dtype=torch.bfloat16)
    return torch.empty(splits, rows, n)

def sums():
    text = compiled.pop().asm["ttgir"]
    layouts = dict(re.findall(r"(#\\w+) = (#ttg.*)", text))
    types = re.findall(r'"tt.reduce".*?\\}\\) : \\(tensor<(\\S+), (#\\w+)>\\)', text, re.DOTALL)
    return [f"{shape} {layouts[name]}" for shape, name in types]
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptServer]:
    with compiling_server(BEGIN) as started:
        yield started


def sums_of(server: ScriptServer, script: str) -> list[list[str]]:
    found: list[list[str]] = json.loads(server.run(script).splitlines()[-1])
    return found


@pytest.mark.parametrize("d", [576, 4096])
def test_residual_norm(server: ScriptServer, d: int) -> None:
    script = f"""
found = []
residual, weight = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((32, {d}), ({d},)))
for splits in (1, 2, 3):
    add_norm.add_norm(product(splits, 32, {d}), residual, weight, 1e-5)
    found.append(sums())
print(json.dumps(found))
"""
    whole, *split = sums_of(server, script)
    assert len(whole) == 1 and split == [whole, whole]


def test_head_norms(server: ScriptServer) -> None:
    script = """
found = []
zeros = torch.zeros(32, dtype=torch.int64)
counts = torch.zeros(4, dtype=torch.int32)
rows = RowPass(zeros, zeros, torch.zeros(4, 16).int(), counts, counts, counts, 8, 16)
norm = torch.empty(128, dtype=torch.bfloat16)
cache = torch.empty(640, 8, 128, dtype=torch.bfloat16)
heads = AttentionHeads(16, 8, norm, norm)
for splits in (1, 2):
    qkv = product(splits, 32, 32 * 128)
    rope_store.rope_store(qkv, rows, torch.empty(4096, 128), cache, cache.clone(), heads)
    found.append(sums())
print(json.dumps(found))
"""
    whole, split = sums_of(server, script)
    assert len(whole) == 6 and split == whole  # three parts of a head, of queries and of keys
