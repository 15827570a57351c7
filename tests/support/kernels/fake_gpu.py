"""A GPU that Triton can compile for, and that launches nothing: `set_active()` in a new process."""

import triton
from triton.backends.compiler import GPUTarget


class FakeGpuDriver:
    def launcher_cls(self, source: object, metadata: object) -> None:
        """Triton's drivers have a class here, which compiles what launches a kernel."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def set_active() -> None:
    triton.runtime.driver.set_active(FakeGpuDriver())
