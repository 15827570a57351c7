"""ServerSettings from the options of `peagle serve`."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from peagle.catalog import DEFAULT_PAIR
from peagle.core import Method, check_k, parse_method
from peagle.errors import UserError, did_you_mean
from peagle.server.http_workers.worker_count import default_http_workers
from peagle.server.settings import ENGINES, EngineKind, ServerSettings
from peagle.server.speculative import SpeculativeConfig, parse_speculative_config

# Options that may be repeated.
TUPLE_OPTIONS = (
    "served_model_names",
    "api_keys",
    "allow_origins",
    "learn_opt_out",
    "vllm_arguments",
)


def build_settings(options: Mapping[str, Any]) -> ServerSettings:
    """`options` are the values of the command's parameters, by the name of the parameter.

    A parameter that is named as a field of ServerSettings becomes that field.
    """
    engine = parse_engine(options["engine"])
    for_vllm = engine == "vllm"
    settings = {name: options[name] for name in setting_names() if name in options}
    settings |= drafting_settings(options, for_vllm)
    settings |= {name: tuple(options[name] or ()) for name in TUPLE_OPTIONS}
    settings |= {
        "pair": options["pair"] or options["model"] or DEFAULT_PAIR,
        "engine": engine,
        "methods": parse_methods(options["methods"]),
        "graphs": not options["enforce_eager"],
        # The environment may set it for vLLM; the native engine does not use it.
        "vllm_python": options["vllm_python"] if for_vllm else None,
    }
    if settings["http_workers"] is None:
        settings["http_workers"] = default_http_workers(options["device"], engine)
    check_parsers(options)
    return ServerSettings(**settings)


def check_parsers(options: Mapping[str, Any]) -> None:
    """Refuse unknown formats before anything is loaded."""
    from peagle.server.parsing.reasoning import find_reasoning_format
    from peagle.server.parsing.tool_formats import find_tool_format

    if options["engine"] == "vllm":
        return
    if options["tool_parser"]:
        find_tool_format(options["tool_parser"])
    if options["reasoning_parser"] not in (None, "none"):
        find_reasoning_format(options["reasoning_parser"])


def setting_names() -> list[str]:
    return [field.name for field in fields(ServerSettings)]


def drafting_settings(options: Mapping[str, Any], for_vllm: bool) -> dict[str, Any]:
    """Return the settings that an option or the speculative config can set; the option wins."""
    config = SpeculativeConfig()
    if options["speculative_config"]:
        config = parse_speculative_config(options["speculative_config"], for_vllm)
    method = parse_method(options["method"]) if options["method"] else config.method
    if config.drafter and options["drafter"]:
        raise UserError(
            "a drafter is named twice: by --drafter and by the speculative config's model"
        )
    use_config_k = config.k and options["k"] == "auto"
    return {
        "method": method,
        "drafter": options["drafter"] or config.drafter,
        "k": config.k if use_config_k else parse_k(options["k"]),
        "tree": config.tree if options["tree"] is None else options["tree"],
        "parallel_drafting": config.parallel_drafting,
        "vllm_speculative": config.vllm_keys,
    }


def parse_k(word: str) -> int | str:
    if word == "auto":
        return word
    try:
        k = int(word)
    except ValueError as error:
        raise UserError(f"cannot read --k {word!r}: use auto or a number") from error
    return check_k(k)


def parse_methods(words: str | None) -> tuple[Method, ...]:
    """Parse method names separated by commas; duplicates are dropped."""
    if not words:
        return ()
    return tuple(dict.fromkeys(parse_method(word.strip()) for word in words.split(",")))


def parse_engine(word: str) -> EngineKind:
    for engine in ENGINES:
        if word == engine:
            return engine
    known = " or ".join(ENGINES)
    raise UserError(f"unknown engine {word!r}: use {known}.{did_you_mean(word, list(ENGINES))}")
