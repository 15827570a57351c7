"""The experts of a layer on a CPU, in C (c/experts.c), with matrices that are packed once.

Rows are grouped by expert, and the matrices of an expert are read once for all of its rows. The
outputs of a row's experts are added by rank: the bits of a row do not depend on its neighbors.
"""

import ctypes
import math
from copy import copy

import torch
from torch import Tensor

from peagle.kernels.cpu.library import DTYPE_SUFFIXES, library
from peagle.kernels.cpu.matrix import (
    Fp8Matrix,
    Int8Matrix,
    MatrixStruct,
    Mxfp4Matrix,
    Packable,
    PackedMatrix,
    is_exact_in_bf16,
    loaded_library,
    quantize_int8,
)
from peagle.kernels.cpu.threads import kernel_threads
from peagle.kernels.expert_matrices import ExpertMatrices, GatedActivation

MAX_EXPERTS = 1024  # as in c/experts.h
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class ExpertsStruct(ctypes.Structure):
    """`struct experts` in c/experts.h."""

    _fields_ = [
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("count", ctypes.c_long),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("up_shift", ctypes.c_float),
    ]


class MoeStruct(ctypes.Structure):
    """`struct moe` in c/experts.h."""

    _fields_ = [
        ("router", MatrixStruct),
        ("experts", ctypes.c_void_p),
        ("top_k", ctypes.c_long),
        ("normalized", ctypes.c_long),
        ("counts", ctypes.c_void_p),
    ]


class PackedExperts:
    """`can_pack_experts` tells whether the matrices are supported."""

    def __init__(
        self,
        gate_up: ExpertMatrices,
        down: ExpertMatrices,
        activation: GatedActivation,
        int8_rows: bool = False,
    ) -> None:
        """`int8_rows`: as in PackedMatrix. Floats are then rounded to int8 as well."""
        count = gate_up.num_experts
        assert down.num_experts == count and down.inputs * 2 == gate_up.outputs
        assert down.outputs == gate_up.inputs
        self.num_experts = count
        self.hidden_size = gate_up.inputs
        self.activation = activation
        order = output_order(gate_up.outputs, activation.interleaved)
        self._use_matrices(
            *(
                [packed_expert(matrices, expert, outputs, int8_rows) for expert in range(count)]
                for matrices, outputs in ((gate_up, order), (down, None))
            )
        )

    def _use_matrices(self, gate_up: list[PackedMatrix], down: list[PackedMatrix]) -> None:
        # The structs point to these.
        self.gate_up = gate_up
        self.down = down
        self.arrays = [
            (MatrixStruct * self.num_experts)(*(matrix.struct for matrix in matrices))
            for matrices in (gate_up, down)
        ]
        activation = self.activation
        self.struct = ExpertsStruct(
            *(ctypes.addressof(array) for array in self.arrays),
            self.num_experts,
            activation.alpha,
            math.inf if activation.limit is None else activation.limit,
            activation.up_shift,
        )
        self.address = ctypes.addressof(self.struct)

    def with_int8_rows(self) -> "PackedExperts":
        """The same codes, multiplied with rows of int8; they are not packed again."""
        experts = copy(self)
        experts._use_matrices(
            *([matrix.with_int8_rows() for matrix in x] for x in (self.gate_up, self.down))
        )
        return experts

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [T, d], chosen [T, top_k] experts with their weights -> [T, d].

        Weights are rounded to the dtype of x. An expert that does not exist adds nothing.
        """
        rows, top_k = chosen.shape
        assert x.shape == (rows, self.hidden_size) and weights.shape == chosen.shape
        x = x if x.stride(1) == 1 else x.contiguous()
        chosen = chosen.long().contiguous()
        weights = weights.to(x.dtype).contiguous()
        out = torch.empty(rows, self.hidden_size, dtype=x.dtype)
        loaded_library().functions["experts", x.dtype](
            self.address,
            x.data_ptr(),
            x.stride(0),
            chosen.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
            rows,
            top_k,
            kernel_threads(),
        )
        return out

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in (*self.gate_up, *self.down))


class PackedMoe:
    """A router and its experts: the MLP of a layer in one call."""

    def __init__(
        self,
        experts: PackedExperts,
        router: PackedMatrix,
        top_k: int,
        normalized: bool,
        counts: Tensor | None = None,
    ) -> None:
        """router: d -> experts, with its bias. The `top_k` experts with the largest logits are
        chosen, the first of equal ones. Logits are rounded to the dtype of the rows, and so are
        the weights: a softmax over all experts, or over the chosen ones if `normalized`.

        `counts` [E + 1] int32: each call writes the rows of each expert, and the number of experts
        that have rows.
        """
        assert (router.n, router.k) == (experts.num_experts, experts.hidden_size)
        assert 1 <= top_k <= experts.num_experts <= MAX_EXPERTS
        self.hidden_size = experts.hidden_size
        if counts is not None:
            assert counts.shape == (router.n + 1,) and counts.dtype == torch.int32
            assert counts.is_contiguous()
        # The struct points to these.
        self.experts = experts
        self.router = router
        self.counts = counts
        counts_address = None if counts is None else counts.data_ptr()
        self.struct = MoeStruct(router.struct, experts.address, top_k, normalized, counts_address)
        self.address = ctypes.addressof(self.struct)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, d] -> [T, d]"""
        assert x.shape[1] == self.hidden_size
        x = x.contiguous()
        out = torch.empty_like(x)
        loaded_library().functions["moe", x.dtype](
            self.address, x.data_ptr(), x.stride(0), out.data_ptr(), len(x), kernel_threads()
        )
        return out


def can_pack_experts(
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    dtype: torch.dtype | None = None,
    int8_rows: bool = False,
) -> bool:
    """Whether `PackedExperts` supports these here, with rows of `dtype` (None: any).

    Float matrices must be exact in bf16, unless they are rounded to int8.
    """
    if library() is None or (dtype is not None and dtype not in DTYPE_SUFFIXES):
        return False
    return gate_up.num_experts <= MAX_EXPERTS and all(
        can_pack_matrices(matrices, int8_rows) for matrices in (gate_up, down)
    )


def has_codes(matrices: ExpertMatrices) -> bool:
    """Whether the matrices are packed as codes, which rows of int8 can be multiplied with."""
    return matrices.scales is not None and matrices.weight.dtype not in FP8_DTYPES


def can_pack_matrices(matrices: ExpertMatrices, int8_rows: bool) -> bool:
    weight = matrices.weight
    if weight.device.type != "cpu" or matrices.inputs % 2:
        return False
    if matrices.scales is not None:
        return matrices.is_mxfp4 or weight.dtype in (torch.int8, *FP8_DTYPES)
    if not weight.dtype.is_floating_point:
        return False
    return int8_rows or all(is_exact_in_bf16(expert) for expert in weight)


def output_order(outputs: int, interleaved: bool) -> Tensor | None:
    """The outputs of gate_up in the order of the kernel: all gates, then all ups."""
    if not interleaved:
        return None
    return torch.cat([torch.arange(0, outputs, 2), torch.arange(1, outputs, 2)])


def packed_expert(
    matrices: ExpertMatrices, expert: int, order: Tensor | None, int8_rows: bool
) -> PackedMatrix:
    """The matrix of one expert; `order`: of its outputs."""

    def ordered(tensor: Tensor) -> Tensor:
        return tensor if order is None else tensor[order]

    bias = None if matrices.bias is None else ordered(matrices.bias[expert])
    if int8_rows and not has_codes(matrices):
        weight: Packable = quantize_int8(ordered(matrices.dense(expert, torch.float32)))
    elif matrices.scales is None:
        weight = ordered(matrices.weight[expert])
    else:
        weight = scaled_matrix(ordered(matrices.weight[expert]), ordered(matrices.scales[expert]))
    return PackedMatrix(weight, bias, int8_rows)


def scaled_matrix(codes: Tensor, scales: Tensor) -> Packable:
    if codes.dtype == torch.uint8:
        return Mxfp4Matrix(codes, scales)
    return Int8Matrix(codes, scales) if codes.dtype == torch.int8 else Fp8Matrix(codes, scales)
