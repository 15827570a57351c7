"""A candidate tree for each request of a batch, grown on the device (peagle/tree.py tells what it is), and the chain.

Of all children of what has been taken the likeliest is taken, again and again: `nodes` rounds, each a maximum over
(row, candidate), all in one program's registers. The chain is the likeliest candidate of each depth, behind the one
before.

Shapes: logp [B, K, J, M], J = M or 1; ids [B, K, M] int64, the candidates; names [V] the target's ids of them,
or None; index [B]: the places whose trees they become. Of every place (`Trees`): chain [P, K..], nodes [P, N..] int64;
parents, depths [P, N..] int32; masks [P, N.. + 1] int64.
"""

from typing import NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without it uses the reference
    triton = None


class DraftTrees(NamedTuple):
    """Written in place: what lies behind K and N stays what it was."""

    chain: Tensor
    nodes: Tensor
    parents: Tensor
    depths: Tensor
    masks: Tensor


class TreeTopology(NamedTuple):
    """Of each request: rows 1..N are nodes. All on one device."""

    candidate: Tensor  # [B, N] int64: among the M of the node's depth
    parent: Tensor  # [B, N] int32: its row
    depth: Tensor  # [B, N] int32: 1..K
    masks: Tensor  # [B, N + 1] int64


def tree_topology(logp: Tensor, nodes: int) -> TreeTopology:
    """logp [B, K, J, M]: of candidate i at depth k + 1 behind candidate j of the depth before; J = 1 where it does not
    depend on that one. Behind the newest token j is 0.

    The definition: of all children of what has been taken, take the likeliest, again and again; of equals the one whose
    parent came first.
    """
    batch, k, width, count = logp.shape
    each = torch.arange(batch, device=logp.device)
    children = logp.new_full((batch, nodes + 1, count), -torch.inf)  # of each row
    children[:, 0] = logp[:, 0, 0]
    candidate, parent, depth = torch.zeros(
        3, batch, nodes + 1, dtype=torch.long, device=logp.device
    )
    masks = torch.ones_like(parent)
    for row in range(1, nodes + 1):
        at = children.flatten(1).argmax(1)
        above, chosen = at // count, at % count
        total = children[each, above, chosen]
        children[each, above, chosen] = -torch.inf
        deep = depth[each, above] + 1
        candidate[:, row], parent[:, row], depth[:, row] = chosen, above, deep
        masks[:, row] = masks[each, above] | 1 << row
        more = logp[each, deep.clamp(max=k - 1), chosen if width > 1 else 0]
        children[:, row] = torch.where((deep < k)[:, None], total[:, None] + more, -torch.inf)
    return TreeTopology(candidate[:, 1:], parent[:, 1:].int(), depth[:, 1:].int(), masks)


def reference(
    logp: Tensor, ids: Tensor, names: Tensor | None, nodes: int, index: Tensor, trees: DraftTrees
) -> None:
    """What the kernel computes, in plain PyTorch."""
    tokens = ids if names is None else names[ids]
    batch, k, width, _ = logp.shape
    each, at = torch.arange(batch, device=logp.device), logp.new_zeros(batch, dtype=torch.long)
    for depth in range(k):
        at = logp[each, depth, at if width > 1 else 0].argmax(-1)
        trees.chain[index, depth] = tokens[each, depth, at]
    if nodes:
        tree = tree_topology(logp, nodes)
        trees.nodes[index, :nodes] = tokens[each[:, None], tree.depth.long() - 1, tree.candidate]
        trees.parents[index, :nodes], trees.depths[index, :nodes] = tree.parent, tree.depth
        trees.masks[index, : nodes + 1] = tree.masks


if triton is not None:

    @triton.jit
    def _kernel(  # type: ignore[no-untyped-def]
        logp,
        candidates,
        names,
        index,
        chain,
        nodes,
        parents,
        depths,
        masks,
        chain_row,
        nodes_row,
        masks_row,
        NAMED: tl.constexpr,
        K: tl.constexpr,
        WIDTH: tl.constexpr,
        COUNT: tl.constexpr,
        NODES: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_M: tl.constexpr,
    ):
        b = tl.program_id(0).to(tl.int64)
        place = tl.load(index + b)
        mine, ids = logp + b * K * WIDTH * COUNT, candidates + b * K * COUNT
        col = tl.arange(0, BLOCK_M)
        chosen = 0
        for depth in range(K):
            behind = chosen if WIDTH > 1 else 0
            x = tl.load(
                mine + (depth * WIDTH + behind) * COUNT + col, mask=col < COUNT, other=-float("inf")
            )
            chosen = tl.argmax(x, 0, tie_break_left=True)
            first = tl.load(ids + depth * COUNT + chosen)
            if NAMED:
                first = tl.load(names + first)
            tl.store(chain + place * chain_row + depth, first)
        if NODES > 0:
            flat, row = tl.arange(0, BLOCK_N * BLOCK_M), tl.arange(0, BLOCK_N)
            owner, candidate = flat // BLOCK_M, flat % BLOCK_M
            children = tl.load(
                mine + candidate, mask=(owner == 0) & (candidate < COUNT), other=-float("inf")
            )
            deep = tl.zeros([BLOCK_N], tl.int32)
            parent = tl.zeros([BLOCK_N], tl.int32)
            taken = tl.zeros([BLOCK_N], tl.int32)
            bits = tl.where(row == 0, 1, 0).to(tl.int64)
            for n in range(1, NODES + 1):
                total, at = tl.max(
                    children, 0, return_indices=True, return_indices_tie_break_left=True
                )
                above, which = at // BLOCK_M, at % BLOCK_M
                depth = tl.sum(tl.where(row == above, deep, 0), 0) + 1
                seen = tl.sum(tl.where(row == above, bits, 0), 0) | (tl.full([], 1, tl.int64) << n)
                new = row == n
                deep, parent = tl.where(new, depth, deep), tl.where(new, above, parent)
                taken, bits = tl.where(new, which, taken), tl.where(new, seen, bits)
                behind = which if WIDTH > 1 else 0
                own = (owner == n) & (candidate < COUNT) & (depth < K)
                more = tl.load(
                    mine + (depth * WIDTH + behind) * COUNT + candidate,
                    mask=own,
                    other=-float("inf"),
                )
                children = tl.where(
                    flat == at, -float("inf"), tl.where(own, total + more, children)
                )
            there = (row > 0) & (row <= NODES)
            token = tl.load(ids + (deep - 1) * COUNT + taken, mask=there, other=0)
            if NAMED:
                token = tl.load(names + token, mask=there, other=0)
            tl.store(nodes + place * nodes_row + row - 1, token, mask=there)
            tl.store(parents + place * nodes_row + row - 1, parent, mask=there)
            tl.store(depths + place * nodes_row + row - 1, deep, mask=there)
            tl.store(masks + place * masks_row + row, bits, mask=row <= NODES)


def build_tree(
    logp: Tensor, ids: Tensor, names: Tensor | None, nodes: int, index: Tensor, trees: DraftTrees
) -> None:
    """With nodes = 0 the chain alone. Log-probabilities must be finite."""
    if triton is None or not (logp.is_cuda or triton.knobs.runtime.interpret):
        reference(logp, ids, names, nodes, index, trees)
        return
    batch, k, width, count = logp.shape
    assert logp.is_contiguous() and ids.is_contiguous() and ids.shape == (batch, k, count)
    assert all(x.stride(1) == 1 for x in trees) and (
        not nodes or trees.nodes.stride() == trees.parents.stride()
    )
    _kernel[(batch,)](
        logp,
        ids,
        names,
        index,
        *trees,
        trees.chain.stride(0),
        trees.nodes.stride(0),
        trees.masks.stride(0),
        NAMED=names is not None,
        K=k,
        WIDTH=width,
        COUNT=count,
        NODES=nodes,
        BLOCK_N=triton.next_power_of_2(nodes + 1),
        BLOCK_M=triton.next_power_of_2(count),
        num_warps=1,
    )
