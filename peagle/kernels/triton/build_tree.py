"""The draft tree (peagle/draft_shape.py) and the chain of each request, built on the device.

A tree grows node by node: of all children of the nodes taken so far, the most likely one is taken.
These are `nodes` steps, each a maximum over (row, candidate), in the registers of one program. The
chain takes the most likely candidate of each depth, behind the one of the depth before.

    K=2, 2 candidates per depth, log-probabilities -0.2 -1.8 (a a') and -0.3 -1.5 (b b'), 4 nodes:

    row         1      2      3      4
    node        a      ab     ab'    a'
    parent      0      1      1      0
    depth       1      2      2      1
    sum         -0.2   -0.5   -1.7   -1.8        chain: a b

Shapes: logp [B, K, J, M] for M candidates, behind J = M candidates of the depth before, or J = 1
where they do not depend on it; candidate_ids [B, K, M] int64; target_ids [V] maps them to the
target's vocabulary, or None; index [B] holds the slots whose trees are written.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.triton import uses_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton the reference runs
    triton = None


class DraftTrees(NamedTuple):
    """The drafts of all S slots, written in place. What lies behind K and N stays what it was."""

    chain: Tensor  # [S, K..] int64: the tokens of the chain
    nodes: Tensor  # [S, N..] int64: the tokens of the tree's nodes, which are rows 1..N
    parents: Tensor  # [S, N..] int32: the row of each node's parent
    depths: Tensor  # [S, N..] int32: 1..K
    masks: Tensor  # [S, N.. + 1] int64: for each row, bits of itself and its ancestors


class TreeTopology(NamedTuple):
    """The trees of B requests, without tokens."""

    candidates: Tensor  # [B, N] int64: the node's candidate among the M of its depth
    parents: Tensor  # [B, N] int32
    depths: Tensor  # [B, N] int32: 1..K
    masks: Tensor  # [B, N + 1] int64


def tree_topology(logp: Tensor, nodes: int) -> TreeTopology:
    """Grow trees of so many nodes. This is the definition of a draft tree.

    logp [B, K, J, M]: of candidate i at depth k + 1 behind candidate j of the depth before (J = 1:
    behind any). Behind the newest token, j is 0. Of equally likely children, the one whose parent
    was taken first is taken.
    """
    batch, k, width, count = logp.shape
    each = torch.arange(batch, device=logp.device)
    children = logp.new_full((batch, nodes + 1, count), -torch.inf)  # sums of each row's children
    children[:, 0] = logp[:, 0, 0]
    candidates, parents, depths = torch.zeros(
        3, batch, nodes + 1, dtype=torch.long, device=logp.device
    )
    masks = torch.ones_like(parents)
    for row in range(1, nodes + 1):
        best = children.flatten(1).argmax(1)
        parent = best // count
        candidate = best % count
        path_logp = children[each, parent, candidate]
        children[each, parent, candidate] = -torch.inf
        depth = depths[each, parent] + 1
        candidates[:, row] = candidate
        parents[:, row] = parent
        depths[:, row] = depth
        masks[:, row] = masks[each, parent] | 1 << row
        child_logp = logp[each, depth.clamp(max=k - 1), candidate if width > 1 else 0]
        children[:, row] = torch.where(
            (depth < k)[:, None], path_logp[:, None] + child_logp, -torch.inf
        )
    return TreeTopology(candidates[:, 1:], parents[:, 1:].int(), depths[:, 1:].int(), masks)


def reference(
    logp: Tensor,
    candidate_ids: Tensor,
    target_ids: Tensor | None,
    nodes: int,
    index: Tensor,
    trees: DraftTrees,
) -> None:
    """The same computation in plain PyTorch."""
    tokens = candidate_ids if target_ids is None else target_ids[candidate_ids]
    batch, k, width, _ = logp.shape
    each = torch.arange(batch, device=logp.device)
    best = logp.new_zeros(batch, dtype=torch.long)
    for depth in range(k):
        best = logp[each, depth, best if width > 1 else 0].argmax(-1)
        trees.chain[index, depth] = tokens[each, depth, best]
    if nodes:
        tree = tree_topology(logp, nodes)
        trees.nodes[index, :nodes] = tokens[each[:, None], tree.depths.long() - 1, tree.candidates]
        trees.parents[index, :nodes] = tree.parents
        trees.depths[index, :nodes] = tree.depths
        trees.masks[index, : nodes + 1] = tree.masks


if triton is not None:

    @triton.jit
    def _build_chain(  # type: ignore[no-untyped-def]
        logp_ptr,
        ids_ptr,
        target_ids_ptr,
        chain_ptr,
        MAPPED: tl.constexpr,
        K: tl.constexpr,
        WIDTH: tl.constexpr,
        COUNT: tl.constexpr,
        BLOCK_M: tl.constexpr,
    ):
        """Store the chain of one request."""
        col = tl.arange(0, BLOCK_M)
        best = 0
        for depth in range(K):
            before = best if WIDTH > 1 else 0
            line_ptr = logp_ptr + (depth * WIDTH + before) * COUNT
            logp = tl.load(line_ptr + col, mask=col < COUNT, other=-float("inf"))
            best = tl.argmax(logp, 0, tie_break_left=True)
            token = tl.load(ids_ptr + depth * COUNT + best)
            if MAPPED:
                token = tl.load(target_ids_ptr + token)
            tl.store(chain_ptr + depth, token)

    @triton.jit
    def _build_nodes(  # type: ignore[no-untyped-def]
        logp_ptr,
        K: tl.constexpr,
        WIDTH: tl.constexpr,
        COUNT: tl.constexpr,
        NODES: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_M: tl.constexpr,
    ):
        """The candidates, parents, depths and masks of one request's rows, [BLOCK_N] each."""
        flat = tl.arange(0, BLOCK_N * BLOCK_M)
        row = tl.arange(0, BLOCK_N)
        owner = flat // BLOCK_M  # children of all rows, side by side
        col = flat % BLOCK_M
        root_mask = (owner == 0) & (col < COUNT)
        children = tl.load(logp_ptr + col, mask=root_mask, other=-float("inf"))
        depths = tl.zeros([BLOCK_N], tl.int32)
        parents = tl.zeros([BLOCK_N], tl.int32)
        candidates = tl.zeros([BLOCK_N], tl.int32)
        masks = tl.where(row == 0, 1, 0).to(tl.int64)
        for n in range(1, NODES + 1):
            path_logp, best = tl.max(
                children, 0, return_indices=True, return_indices_tie_break_left=True
            )
            parent = best // BLOCK_M
            candidate = best % BLOCK_M
            depth = tl.sum(tl.where(row == parent, depths, 0), 0) + 1
            parent_mask = tl.sum(tl.where(row == parent, masks, 0), 0)
            depths = tl.where(row == n, depth, depths)
            parents = tl.where(row == n, parent, parents)
            candidates = tl.where(row == n, candidate, candidates)
            masks = tl.where(row == n, parent_mask | (tl.full([], 1, tl.int64) << n), masks)
            before = candidate if WIDTH > 1 else 0
            child_mask = (owner == n) & (col < COUNT) & (depth < K)
            line_ptr = logp_ptr + (depth * WIDTH + before) * COUNT
            child_logp = tl.load(line_ptr + col, mask=child_mask, other=-float("inf"))
            children = tl.where(child_mask, path_logp + child_logp, children)
            children = tl.where(flat == best, -float("inf"), children)
        return candidates, parents, depths, masks

    @triton.jit
    def _build_tree_kernel(  # type: ignore[no-untyped-def]
        logp_ptr,
        candidate_ids_ptr,
        target_ids_ptr,
        index_ptr,
        chain_ptr,
        nodes_ptr,
        parents_ptr,
        depths_ptr,
        masks_ptr,
        stride_chain_row,
        stride_nodes_row,
        stride_masks_row,
        MAPPED: tl.constexpr,
        K: tl.constexpr,
        WIDTH: tl.constexpr,
        COUNT: tl.constexpr,
        NODES: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_M: tl.constexpr,
    ):
        b = tl.program_id(0).to(tl.int64)
        slot = tl.load(index_ptr + b)
        logp = logp_ptr + b * K * WIDTH * COUNT
        ids = candidate_ids_ptr + b * K * COUNT
        chain = chain_ptr + slot * stride_chain_row
        _build_chain(logp, ids, target_ids_ptr, chain, MAPPED, K, WIDTH, COUNT, BLOCK_M)
        if NODES > 0:
            candidates, parents, depths, masks = _build_nodes(
                logp, K, WIDTH, COUNT, NODES, BLOCK_N, BLOCK_M
            )
            row = tl.arange(0, BLOCK_N)
            mask = (row > 0) & (row <= NODES)
            token = tl.load(ids + (depths - 1) * COUNT + candidates, mask=mask, other=0)
            if MAPPED:
                token = tl.load(target_ids_ptr + token, mask=mask, other=0)
            node = slot * stride_nodes_row + row - 1
            tl.store(nodes_ptr + node, token, mask=mask)
            tl.store(parents_ptr + node, parents, mask=mask)
            tl.store(depths_ptr + node, depths, mask=mask)
            tl.store(masks_ptr + slot * stride_masks_row + row, masks, mask=row <= NODES)


def build_tree(
    logp: Tensor,
    candidate_ids: Tensor,
    target_ids: Tensor | None,
    nodes: int,
    index: Tensor,
    trees: DraftTrees,
) -> None:
    """Write the chains and, unless `nodes` is 0, the trees. Log-probabilities must be finite."""
    if not uses_triton(logp):
        reference(logp, candidate_ids, target_ids, nodes, index, trees)
        return
    batch, k, width, count = logp.shape
    assert logp.is_contiguous() and candidate_ids.is_contiguous()
    assert candidate_ids.shape == (batch, k, count)
    assert all(x.stride(1) == 1 for x in trees)
    assert not nodes or trees.nodes.stride() == trees.parents.stride()
    _build_tree_kernel[(batch,)](
        logp,
        candidate_ids,
        target_ids,
        index,
        *trees,
        trees.chain.stride(0),
        trees.nodes.stride(0),
        trees.masks.stride(0),
        MAPPED=target_ids is not None,
        K=k,
        WIDTH=width,
        COUNT=count,
        NODES=nodes,
        BLOCK_N=triton.next_power_of_2(nodes + 1),
        BLOCK_M=triton.next_power_of_2(count),
        num_warps=1,
    )
