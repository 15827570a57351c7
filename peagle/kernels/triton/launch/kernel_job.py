"""KernelJob: a kernel to be compiled, also by another process, which finds its function by name."""

import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any

try:
    import triton
    from triton.compiler import ASTSource
except ImportError:  # without Triton there is nothing to compile
    triton = None


@dataclass(frozen=True, slots=True)
class KernelJob:
    module: str
    function: str
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: Any
    target: Any  # the kind of GPU
    options: dict[str, Any]

    @classmethod
    def create(cls, source: Any, target: Any, options: dict[str, Any]) -> "KernelJob | None":
        """`source`: Triton's ASTSource. None if the function is not an attribute of its module."""
        function = source.fn
        module = sys.modules.get(function.__module__)
        is_attribute = getattr(module, function.__name__, None) is function
        if not is_attribute:
            return None
        return cls(
            function.__module__,
            function.__name__,
            source.signature,
            source.constants,
            source.attrs,
            target,
            options,
        )

    def compile(self) -> None:
        function = getattr(import_module(self.module), self.function)
        source = ASTSource(function, self.signature, self.constants, self.attributes)
        compile_kernel(source, self.target, self.options)


def compile_kernel(source: Any, target: Any, options: dict[str, Any]) -> None:
    """Compile a kernel, and the function in C that launches it where Triton has one for each."""
    kernel = triton.compile(source, target=target, options=options)
    triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
