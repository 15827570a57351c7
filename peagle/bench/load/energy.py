"""Joules a GPU has used, by its driver's own counter (NVML). Nothing where there is none."""

import ctypes
from contextlib import suppress
from typing import Any

import torch


class EnergyMeter:
    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._handle = ctypes.c_void_p()
        if device.type == "cuda":
            with suppress(OSError, AttributeError):
                self._open(device)

    def _open(self, device: torch.device) -> None:
        """By the GPU's UUID: the driver and CUDA count devices differently."""
        nvml: Any = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        if (
            nvml.nvmlInit_v2() == 0
            and nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self._handle)) == 0
        ):
            self._nvml = nvml

    def joules(self) -> float | None:
        """Since the driver was loaded: take the difference of two."""
        if self._nvml is None:
            return None
        used = ctypes.c_ulonglong()
        with suppress(AttributeError):  # a driver that is too old
            if (
                self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(used))
                == 0
            ):
                return used.value / 1000
        return None
