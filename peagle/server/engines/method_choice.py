"""Which methods a server offers, and which one is its default."""

from peagle.catalog.pair import Pair
from peagle.core import DRAFTER_METHODS, Method
from peagle.draft_shape import check_tree_nodes
from peagle.errors import UserError, did_you_mean
from peagle.server.http.errors import ApiError
from peagle.server.http.logs import log_event
from peagle.server.messages import EngineKey
from peagle.server.settings import ServerSettings

# Concurrency at which a tuned method is looked up; K then follows the load, down to 0.
LOW_CONCURRENCY = 1


def choose_method(settings: ServerSettings, pair: Pair) -> tuple[EngineKey, tuple[Method, ...]]:
    """The server's default method and K, and every method that a request may choose."""
    methods = settings.methods or ("none", "ngram", *sorted(pair.drafters))
    method = settings.method or tuned_method(settings, pair, methods) or default_method(pair)
    check_tree_nodes(settings.tree or 0, (), method)
    if method in DRAFTER_METHODS:
        check_drafting(method, settings.parallel_drafting, pair)
    for offered in methods:
        if offered in DRAFTER_METHODS:
            pair.drafter(offered)  # A missing drafter is an error now, not at the first request.
    if method not in methods:
        raise UserError(
            f"`method` {method} is not among `methods` {','.join(methods)}: add it there"
        )
    return EngineKey(method, settings.k if method != "none" else 0), methods


def default_method(pair: Pair) -> Method:
    return pair.method if pair.method in pair.drafters else next(iter(pair.drafters), "none")


def tuned_method(
    settings: ServerSettings, pair: Pair, methods: tuple[Method, ...]
) -> Method | None:
    """The method that `peagle tune` chose on this machine, if neither method nor K is given."""
    if settings.k != "auto" or not pair.k_by_concurrency:
        return None
    best = pair.best(LOW_CONCURRENCY).method
    if best not in methods:
        return None
    log_event("method as tuned on this machine", method=best, otherwise=default_method(pair))
    return best


def check_drafting(method: Method, parallel: bool | None, pair: Pair) -> None:
    """Check what a speculative config says about the drafter against the drafter itself."""
    pair.drafter(method)
    if parallel is not None and parallel != (method == "p-eagle"):
        expected = "true" if method == "p-eagle" else "false"
        raise UserError(
            f"the drafter is {method}, so parallel_drafting must be {expected} in the"
            " speculative config"
        )


def choose_engine(
    method: str | None,
    k: int | str | None,
    main: EngineKey,
    methods: tuple[Method, ...],
    default_k: int | str,
) -> EngineKey:
    """The engine for a request that asks for this method and K; None: the server's own."""
    if method is None and k is None:
        return main
    name = method or main.method
    chosen = next((offered for offered in methods if offered == name), None)
    if chosen is None:
        close = did_you_mean(name, list(methods))
        offered = ", ".join(methods)
        raise ApiError(400, f"peagle.method {name!r} is not served: use one of {offered}.{close}")
    if chosen == "none":
        return EngineKey("none", 0)
    return EngineKey(chosen, k or default_k)
