"""Which methods a server has, and which of them is its own."""

from peagle.catalog.pair import Pair
from peagle.core import Method
from peagle.draft_shape import check_tree_nodes
from peagle.errors import UserError
from peagle.server.http.logs import log_event
from peagle.server.settings import ServerSettings

Key = tuple[Method, int | str]
QUIET = 1  # the load at which a tuned method is taken: from there on K follows the load, 0 included


def choose_method(how: ServerSettings, pair: Pair) -> tuple[Key, tuple[Method, ...]]:
    """The server's own method and K, and all that requests may choose."""
    methods = how.methods or ("none", *sorted(pair.drafters))
    method = how.method or tuned_method(how, pair, methods) or usual_method(pair)
    check_tree_nodes(how.tree or 0, (), method)
    if method != "none":
        check_drafting(method, how.parallel_drafting, pair)
    for one in methods:
        if one != "none":
            pair.drafter(one)  # refused now, not when it is first asked for
    if method not in methods:
        raise UserError(
            f"--method {method} is not among --methods {','.join(methods)}: add it there"
        )
    return (method, how.k if method != "none" else 0), methods


def usual_method(pair: Pair) -> Method:
    return pair.method if pair.method in pair.drafters else next(iter(pair.drafters), "none")


def tuned_method(how: ServerSettings, pair: Pair, methods: tuple[Method, ...]) -> Method | None:
    """What `peagle tune` found on this machine, where neither a method nor K is given."""
    if how.k != "auto" or not pair.k_by_concurrency:
        return None
    best = pair.best(QUIET).method
    if best not in methods:
        return None
    log_event("method as tuned on this machine", method=best, otherwise=usual_method(pair))
    return best


def check_drafting(method: Method, parallel: bool | None, pair: Pair) -> None:
    """What a speculative config says of its drafter must be true."""
    pair.drafter(method)
    if parallel is not None and parallel != (method == "p-eagle"):
        word = "true" if method == "p-eagle" else "false"
        raise UserError(
            f"the drafter is {method}, so parallel_drafting must be {word} in the speculative config"
        )
