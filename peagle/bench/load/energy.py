"""EnergyMeter: the joules that a GPU has used, from the counter of its driver (NVML)."""

import ctypes
from contextlib import suppress
from typing import Any

import torch


class EnergyMeter:
    """Reads nothing on a CPU, and on a GPU whose driver has no such counter."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._handle = ctypes.c_void_p()
        if device.type == "cuda":
            with suppress(OSError, AttributeError):
                self._open(device)

    def _open(self, device: torch.device) -> None:
        """Find the GPU by its UUID: the driver and CUDA number devices differently."""
        nvml: Any = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        if nvml.nvmlInit_v2() != 0:
            return
        if nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self._handle)) == 0:
            self._nvml = nvml

    def joules(self) -> float | None:
        """Energy since the driver was loaded. Take the difference of two readings."""
        if self._nvml is None:
            return None
        millijoules = ctypes.c_ulonglong()
        with suppress(AttributeError):  # an old driver does not have the function
            status = self._nvml.nvmlDeviceGetTotalEnergyConsumption(
                self._handle, ctypes.byref(millijoules)
            )
            if status == 0:
                return millijoules.value / 1000
        return None
