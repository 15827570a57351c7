"""The draft shapes that adaptive drafting chooses from."""

from peagle.draft_shape import DraftShape

CHAIN_LENGTHS = (0, 1, 2, 3, 5, 7, 11, 15)
# Rows of the smallest tree, newest token included: kernels process 16, 32 or 64 rows at a time.
MIN_TREE_ROWS = 16
MAX_TREE_CANDIDATES = 3
# The largest tree has at least this many times the nodes of the next smaller candidate.
MIN_TREE_SIZE_RATIO = 1.2


def candidate_shapes(max_k: int, max_nodes: int = 0) -> tuple[DraftShape, ...]:
    """No draft, chains up to `max_k`, and trees of that depth with up to `max_nodes` nodes.

    candidate_shapes(7, 31): chains of 0, 1, 2, 3, 5 and 7, trees of 15 and 31 nodes.
    """
    lengths = (*(k for k in CHAIN_LENGTHS if k < max_k), max_k)
    sizes = [(MIN_TREE_ROWS << n) - 1 for n in range(MAX_TREE_CANDIDATES)]
    smaller = [nodes for nodes in sizes if max_k < nodes < max_nodes / MIN_TREE_SIZE_RATIO]
    tree_sizes = (*smaller[1 - MAX_TREE_CANDIDATES :], max_nodes) if max_nodes else ()
    chains = [DraftShape(k, k) for k in lengths]
    trees = [DraftShape(max_k, nodes) for nodes in tree_sizes]
    return (*chains, *trees)
