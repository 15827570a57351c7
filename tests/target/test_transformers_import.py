"""transformers is imported without modules that inference does not use, but they stay importable.

The scripts run in separate processes, because the tests have imported everything.
"""

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from peagle.target.meta_initialization import no_meta_initialization
from peagle.target.transformers_import import PackageDistributions
from tests.support.models.rope_models import rope_model
from tests.support.script_server import ScriptServer, script_server

ROOT = Path(__file__).parents[2]
HEAVY = ("sympy", "torch.distributed.tensor", "torch._inductor", "pygments", "httpx._main")


def run_script(script: str) -> Any:
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return last_line(done.stdout.decode())


def last_line(output: str) -> Any:
    """The last line of the output; libraries may print warnings before it."""
    return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="module")
def after_torch() -> Iterator[ScriptServer]:
    """Runs scripts in processes that have imported torch."""
    with script_server("import json, sys, torch") as server:
        yield server


def test_models_load_and_run_without_heavy_modules(tmp_path: Path) -> None:
    """One of the models has longrope, which multiplies a list of factors with a range."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=64, num_attention_heads=2, **sizes)
    model = LlamaForCausalLM(config).eval()
    longrope = rope_model("phi3")
    model.save_pretrained(tmp_path / "llama")
    longrope.save_pretrained(tmp_path / "longrope")
    script = f"""
import json, sys
from pathlib import Path
from peagle.server.engines.engine_factory import import_models
import_models("cpu")
import torch
from peagle.target import load_target
targets = [load_target(Path({str(tmp_path)!r}) / name, torch.float32, "cpu", context=40)
    for name in ("llama", "longrope")]
logits = [target.forward(torch.arange(6)).logits[-1].tolist() for target in targets]
heavy = [name for name in {HEAVY!r} if name in sys.modules]
with torch.device("meta"):
    is_meta = torch.arange(2).is_meta
print(json.dumps([logits, heavy, is_meta]))
"""
    logits, heavy, is_meta = run_script(script)
    with torch.inference_mode():
        expected = [x(torch.arange(6)[None]).logits[0, -1] for x in (model, longrope)]
    assert heavy == [] and is_meta
    for ours, theirs in zip(logits, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours), theirs)


def test_a_drafter_is_read_without_heavy_modules(after_torch: ScriptServer) -> None:
    script = f"""
from pathlib import Path
from peagle.target.transformers_import import quick_imports
with quick_imports():
    from peagle.drafter.formats import checkpoint
drafter = next(path.parent for path in Path("peagle/drafters").rglob("config.json"))
problems = checkpoint.read(drafter).problems()
print(json.dumps([problems, [name for name in {HEAVY!r} if name in sys.modules]]))
"""
    assert last_line(after_torch.run(script)) == [[], []]


def test_values_are_created_on_the_cpu_while_a_model_is_created() -> None:
    """Arrays, too. Empty lists stay on meta: transformers reads the current device from them."""
    with no_meta_initialization(), torch.device("meta"):
        assert torch.tensor([]).is_meta and torch.empty(2).is_meta
        assert torch.tensor([1.0], device="meta").is_meta
        for values in ([1.0, 2.0], np.array([1.0, 2.0]), np.array([1.0])):
            assert torch.tensor(values).device.type == "cpu"
        assert torch.arange(3).tolist() == [0, 1, 2]


def test_other_models_and_the_compiler_can_be_imported(after_torch: ScriptServer) -> None:
    script = """
from peagle.target.transformers_import import quick_imports
with quick_imports():
    import transformers
    from transformers.models.llama import modeling_llama
names = [transformers.MixtralConfig.__name__, transformers.models.gpt2.__name__]
try:
    transformers.NoSuchModel
except AttributeError:
    names.append("unknown")
add = torch.compile(lambda x: x + 1, backend="eager")
import torch._dynamo.config
print(json.dumps([names, add(torch.ones(2)).tolist(), len(transformers.__all__) > 4000]))
"""
    names = ["MixtralConfig", "transformers.models.gpt2", "unknown"]
    assert last_line(after_torch.run(script)) == [names, [2.0, 2.0], True]


@pytest.mark.parametrize(
    "module",
    # The package of the compiler imports both modules.
    ["config", pytest.param("variables.base", marks=pytest.mark.slow)],
)
def test_modules_of_the_compiler_are_executed_once(module: str, after_torch: ScriptServer) -> None:
    script = f"""
from importlib.machinery import SourceFileLoader
from peagle.target.transformers_import import quick_imports
with quick_imports():
    import transformers
execute, names = SourceFileLoader.exec_module, []
def count(loader, module):
    names.append(module.__name__)
    execute(loader, module)
SourceFileLoader.exec_module = count
import torch._dynamo.{module} as module
loader = type(module.__spec__.loader).__name__
same = module is sys.modules[module.__name__] is torch._dynamo.{module}
print(json.dumps([names.count(module.__name__), loader, same]))
"""
    assert last_line(after_torch.run(script)) == [1, "SourceFileLoader", True]


def test_quick_imports_find_distributions_with_other_names() -> None:
    script = """
import importlib.metadata, json
from peagle.target.transformers_import import quick_imports
with quick_imports():
    found = importlib.metadata.packages_distributions().get("yaml")
print(json.dumps(found))
"""
    assert run_script(script) == importlib.metadata.packages_distributions()["yaml"]


@pytest.mark.parametrize("package", ["torch", "transformers", "jinja2", "yaml", "no_such_package"])
def test_distributions_of_packages(package: str) -> None:
    expected = importlib.metadata.packages_distributions().get(package)
    found = PackageDistributions().get(package)
    assert [name.lower() for name in found or []] == [name.lower() for name in expected or []][:1]
