"""A fake GPU that Triton can compile for but not launch on: `set_active()` in a new process."""

import triton
from triton.backends.compiler import GPUTarget


class FakeGpuDriver:
    def launcher_cls(self, source: object, metadata: object) -> None:
        """Drivers of Triton have a class here, which compiles the launcher of a kernel."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def set_active() -> None:
    triton.runtime.driver.set_active(FakeGpuDriver())
