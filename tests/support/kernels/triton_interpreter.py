"""Runs Triton kernels in Triton's interpreter, in a separate process."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

# Triton reads the variable when it is imported, so the interpreter needs a separate process.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")


def run_interpreted_tests(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of files whose names contain `interpreted`, all in one process.

    `arguments`: the files, and options of pytest.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "interpreted"]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    return subprocess.run([*command, *arguments], env=env, capture_output=True, text=True)


def patch_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work around an error of Triton's interpreter (3.6), and remove half of its overhead."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        """Let an array of one element be a loop bound: numpy 2.4 refuses int() of it."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_and_index)
    _patch_once_per_launch(monkeypatch, interpreter)
    _skip_overflow_checks(monkeypatch, interpreter)
    _build_numpy_types_once(monkeypatch, interpreter)
    _build_block_types_once(monkeypatch, interpreter.tl.core)


def _skip_overflow_checks(monkeypatch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Skip overflow conditions, whose assertions Triton omits without debug mode."""
    builder = interpreter.interpreter_builder
    options = dataclasses.replace(builder.options, sanitize_overflow=False)
    monkeypatch.setattr(builder, "options", options)


def _build_numpy_types_once(monkeypatch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Build Triton's dictionary of numpy types once per type, not once per tensor."""
    get_numpy_type = interpreter._get_np_dtype
    of_scalar = cache(get_numpy_type)

    def numpy_type(dtype: Any) -> Any:
        return get_numpy_type(dtype) if dtype.scalar.is_ptr() else of_scalar(dtype.scalar)

    monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_type)


def _build_block_types_once(monkeypatch: pytest.MonkeyPatch, core: Any) -> None:
    """Build the fields of a block type, and the shape of its tensors, once per type."""
    build_type = core.block_type.__init__
    build_tensor = core.tensor.__init__
    known: dict[tuple[int, ...], dict[str, Any]] = {}  # The fields keep the element type alive.

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = (size.value if isinstance(size, core.constexpr) else size for size in shape)
        key = (id(element_ty), *sizes)
        if key not in known:
            build_type(self, element_ty, shape)
            tensor = core.tensor.__new__(core.tensor)
            build_tensor(tensor, None, self)
            known[key] = vars(self) | {"tensor_fields": vars(tensor)}
        vars(self).update(known[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        fields = vars(type).get("tensor_fields")
        if fields is None:
            build_tensor(self, handle, type)
        else:
            vars(self).update(fields, handle=handle, type=type)

    monkeypatch.setattr(core.block_type, "__init__", init_type)
    monkeypatch.setattr(core.tensor, "__init__", init_tensor)


def _patch_once_per_launch(monkeypatch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Patch the modules of triton.language once per launch, not at each call of a function."""
    launch = interpreter.GridExecutor.__call__
    patch_language = interpreter._patch_lang
    patched: set[frozenset[str]] = set()

    @cache
    def language_names(fn: Callable[..., Any]) -> frozenset[str]:
        languages = (interpreter.tl, interpreter.tl.core)
        values = fn.__globals__.values()
        return frozenset(v.__name__ for v in values if any(v is module for module in languages))

    def launch_unpatched(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    def patch_new_modules(fn: Callable[..., Any]) -> Any:
        names = language_names(fn)
        if names in patched:
            return None  # The scope of the launch restores the modules.
        patched.add(names)
        return patch_language(fn)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_unpatched)
    monkeypatch.setattr(interpreter, "_patch_lang", patch_new_modules)
