"""Import transformers without the parts that loading and running a model here never needs.

`import transformers` and its models take as long as torch itself. Most of that is not code that
runs a model:

    packages_distributions   reads the file lists of all installed packages, to know their versions
    import structure         reads the source of all 500 model folders, for `transformers.<Name>`
    torch.distributed.tensor, torch._dynamo and sympy: for training and `torch.compile`
    the command line of httpx: rich, pygments, click

Inside `quick_imports` the first two are looked up only for what is asked for, and the others are
not imported: 1,110 of 2,970 modules (`len(sys.modules)` after `import_models("cpu")`, and after
the same imports without this). Everything stays reachable by name: `transformers.<Name>` of a
model not known yet reads all folders then; `dir` and `from transformers import *` list known
models only until then. Distributed training must not import transformers this way: it believes
that torch has no distributed package.
"""

import importlib
import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import packages_distributions
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

IMPORT_UTILS = "transformers.utils.import_utils"
# Models whose classes are found without reading all folders: they are imported by name.
KNOWN_MODELS = ("auto", "llama")
DYNAMO = "torch._dynamo"  # The compiler of torch, whose decorators transformers uses.
DYNAMO_TRACING = "torch._dynamo._trace_wrapped_higher_order_op"
COMMAND_LINE = "httpx._main"  # httpx does without it.
ALIASED_FILES = "image_processing_*.py"  # Of which transformers creates aliases.
COMPLETED = ("_modules", "_class_to_module", "_object_missing_backend", "__all__")
_lock = Lock()


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import transformers quickly inside this block; nothing changes if it is imported already."""
    if "transformers" in sys.modules:
        yield
        return
    with _lock, _replaced_lookups(), without_command_lines():
        _replace_dynamo()
        finder = _ImportUtilsFinder()
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)


@contextmanager
def _replaced_lookups() -> Iterator[None]:
    rglob = Path.rglob

    def search(folder: Path, pattern: str, **options: Any) -> Iterator[Path]:
        return iter(()) if pattern == ALIASED_FILES else rglob(folder, pattern, **options)

    importlib.metadata.packages_distributions = PackageDistributions
    Path.rglob = search  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = packages_distributions
        Path.rglob = rglob  # type: ignore[method-assign]


def _replace_dynamo() -> None:
    """The stand-ins for torch's compiler stay: creating a model asks for its decorators too."""
    if DYNAMO not in sys.modules:
        sys.modules[DYNAMO] = DynamoDecorators(DYNAMO)
        sys.modules[DYNAMO_TRACING] = DynamoDecorators(DYNAMO_TRACING)
        sys.meta_path.insert(0, _DynamoFinder())


@contextmanager
def without_command_lines() -> Iterator[None]:
    """Import httpx without its command line inside this block."""
    if COMMAND_LINE in sys.modules:
        yield
        return
    sys.modules[COMMAND_LINE] = None  # type: ignore[assignment]  # Python: it cannot be imported.
    try:
        yield
    finally:
        del sys.modules[COMMAND_LINE]


class DynamoDecorators(ModuleType):
    """What transformers and eager torch use of torch's compiler: decorators, which do nothing here.

    Anything else, such as `torch.compile`, imports the real one.
    """

    @staticmethod
    def assume_constant_result(function: Any) -> Any:
        return function

    @staticmethod
    def allow_in_graph(function: Any) -> Any:
        return function

    @staticmethod
    def disable(function: Any = None, *_: Any, **options: Any) -> Any:
        return function if function is not None else lambda function: function

    def TransformGetItemToIndex(self) -> Any:
        """Of the module DYNAMO_TRACING: an object that transformers uses to create some masks."""
        return self.import_real().TransformGetItemToIndex()

    def __getattr__(self, name: str) -> Any:
        if name == "__path__" and self.__name__ == DYNAMO:
            return []  # A package, whose modules _DynamoFinder finds.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.import_real(), name)

    def import_real(self) -> ModuleType:
        for module in (DYNAMO, DYNAMO_TRACING):
            if isinstance(sys.modules.get(module), DynamoDecorators):
                del sys.modules[module]
        return importlib.import_module(self.__name__)


class _DynamoFinder(MetaPathFinder):
    """Imports the real compiler before the first of its modules that is imported by name."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = sys.modules.get(DYNAMO)
        if not name.startswith(f"{DYNAMO}.") or not isinstance(package, DynamoDecorators):
            return None
        package = package.import_real()
        module = sys.modules.get(name)
        if module is None or module.__spec__ is None:
            return PathFinder.find_spec(name, package.__path__, target)
        module.__spec__.loader = _LoadedModule(module, module.__spec__)
        return module.__spec__


class _LoadedModule(Loader):
    """Loads a module that the import of its package has executed: it is not executed again."""

    def __init__(self, module: ModuleType, spec: ModuleSpec) -> None:
        self._module = module
        self._loader = spec.loader
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        self._spec.loader = self._loader


class PackageDistributions(dict[str, list[str]]):
    """The mapping of importlib.metadata, from packages to distributions, filled when it is asked.

    Most distributions have the name of their package. Only for others all of them are read.
    """

    def get(self, package: str, default: Any = None) -> Any:
        if package not in self:
            self._find(package)
        return super().get(package, default)

    def _find(self, package: str) -> None:
        for name in (package.replace("_", "-"), package):
            try:
                importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
            self[package] = [name]
            return
        for key, names in packages_distributions().items():
            self.setdefault(key, list(names))


class _ImportUtilsFinder(MetaPathFinder):
    """Finds the module of transformers that defines its lazy imports, and changes it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != IMPORT_UTILS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _change_import_utils(module)

        loader.exec_module = exec_module
        return spec


def _change_import_utils(utils: Any) -> None:
    """Let the modules `transformers` and `transformers.models` know few models at first."""
    scan = utils.define_import_structure
    lazy_module = utils._LazyModule
    get_attribute = lazy_module.__getattr__
    incomplete = {"transformers": "models", "transformers.models": ""}

    def define_import_structure(path: Any, prefix: str | None = None) -> Any:
        models = Path(path).parent if Path(path).name == "__init__.py" else Path(path)
        if models.parts[-2:] != ("transformers", "models"):
            return scan(path, prefix)
        structure: dict[frozenset[str], dict[str, set[str]]] = {frozenset(): {}}
        for model in KNOWN_MODELS:
            name = f"{prefix}.{model}" if prefix else model
            for backends, modules in scan(str(models / model), name).items():
                structure.setdefault(backends, {}).update(modules)
        return structure

    def complete(module: Any) -> None:
        """Read all folders of models."""
        prefix = incomplete[module._name]
        folder = Path(module.__file__).parent
        full = scan(str(folder / prefix), prefix or None)
        full = {backends: dict(modules) for backends, modules in full.items()}
        own = {key: set(names) for key, names in module._import_structure.items()}
        full.setdefault(frozenset(), {}).update(
            {key: names for key, names in own.items() if not key.startswith(f"{prefix}.")}
        )
        other = lazy_module(module._name, module.__file__, full, module.__spec__, module._objects)
        for name in COMPLETED:
            setattr(module, name, getattr(other, name))
        del incomplete[module._name]

    def getattr_of_all(module: Any, name: str) -> Any:
        try:
            return get_attribute(module, name)
        except AttributeError:
            if name.startswith("__") or module._name not in incomplete:
                raise
        if has_submodule(Path(module.__file__).parent, name):
            return importlib.import_module(f"{module.__name__}.{name}")
        complete(module)
        return get_attribute(module, name)

    utils.define_import_structure = define_import_structure
    utils.is_torch_distributed_available = lambda: False
    lazy_module.__getattr__ = getattr_of_all


def has_submodule(folder: Path, name: str) -> bool:
    """Whether Python would import a submodule of this name, of a package in `folder`."""
    return (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()
