"""The device: copies to it that do not wait for it, and how its loss is recognized."""

import torch
from torch import Tensor

# Messages of errors after which every call to the device fails until the process ends: those of
# PyTorch and of Triton, with the driver's own words behind them.
DEVICE_ERRORS = ("cuda error", "hip error", "triton error [cuda]", "triton error [hip]")
STICKY_ERRORS = (
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "device-side assert",
    "unspecified launch failure",
    "uncorrectable ecc",
    "uncorrectable nvlink",
)
# Device errors after which the device still works. An error of any other kind counts as a loss: a
# process that ends for nothing is replaced, one that tries again for ever is not.
RECOVERABLE_ERRORS = (
    "out of memory",
    "alloc_failed",
    "is capturing",
    "stream capture",
    "invalid argument",
    "invalid configuration",
    "invalid device ordinal",
    "no kernel image",
)


class DeviceLost(RuntimeError):
    """The device fails every call from now on. Only a new process can use it again."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device` without waiting for the device."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def is_device_lost(error: BaseException | None) -> bool:
    """Whether `error`, or an error that it was raised from, says that the device is lost."""
    while error is not None:
        if isinstance(error, DeviceLost) or _is_sticky(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_sticky(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    text = str(error).lower()
    if any(sticky in text for sticky in STICKY_ERRORS):
        return True
    if any(recoverable in text for recoverable in RECOVERABLE_ERRORS):
        return False
    accelerator_error = getattr(torch, "AcceleratorError", None)  # Older versions have none.
    if accelerator_error is not None and isinstance(error, accelerator_error):
        return True
    return any(device_error in text for device_error in DEVICE_ERRORS)
