"""The C kernels widen every half-precision number exactly, at every CPU level."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from peagle.kernels.cpu.compiler import compiler_names, installed
from peagle.kernels.cpu.level import CpuLevel, supported_levels
from peagle.kernels.cpu.library import SOURCE_FOLDER

COMPILER = next(installed(compiler_names()), None)
WIDEN = """
#include "common.h"
void widen(const uint16_t *from, float *to, long n) {
    for (long i = 0; i < n; i += LANES) store_f32(to + i, load_f16(from + i), LANES);
}
"""


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize("level", supported_levels(), ids=lambda level: level.name)
def test_every_number_is_widened_exactly(level: CpuLevel, tmp_path: Path) -> None:
    (tmp_path / "widen.c").write_text(WIDEN)
    files = [str(tmp_path / "widen.c"), "-o", str(tmp_path / "widen.so")]
    flags = ["-O2", "-std=gnu11", "-fPIC", "-shared", "-Wno-psabi", f"-I{SOURCE_FOLDER}"]
    assert COMPILER is not None
    subprocess.run([COMPILER, *flags, *level.flags, *files], check=True)
    codes = torch.arange(1 << 16).to(torch.int32).to(torch.uint16)
    wide = torch.empty(1 << 16)
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (codes, wide))
    ctypes.CDLL(str(tmp_path / "widen.so")).widen(*pointers, ctypes.c_long(1 << 16))
    expected = codes.view(torch.float16).float()
    finite = ~expected.isnan()
    assert torch.equal(wide.view(torch.int32)[finite], expected.view(torch.int32)[finite])
    assert wide[~finite].isnan().all()
