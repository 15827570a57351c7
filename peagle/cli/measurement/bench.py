import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from peagle.catalog import DEFAULT_PAIR
from peagle.cli.application import app
from peagle.cli.measurement.bench_options import (
    DEFAULT_KS,
    ApiKey,
    BaselineRun,
    ClientCount,
    DraftLengths,
    EndpointUrl,
    IgnoreEos,
    LengthProfile,
    MaxAnswerTokens,
    Methods,
    OutFolder,
    PairName,
    Repeats,
    RunName,
    Seed,
    ServedModel,
    Sets,
    Temperature,
    TreeSizes,
    WarmupTokens,
    WithScores,
)
from peagle.cli.measurement.bench_run import prepare_endpoint, prepare_native, run_session
from peagle.cli.measurement.lists import parse_counts, parse_ks, parse_trees, split_words
from peagle.cli.measurement.options import (
    DEFAULT_SETS,
    DataFolder,
    Drafters,
    TaskLimit,
    UserCounts,
)
from peagle.cli.options import Device, Dtype, Exact, Ngram, Target
from peagle.core import parse_method
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.bench.prepare import BenchCommand
    from peagle.bench.settings import BenchSettings


@app.command()
def bench(
    pair: PairName = None,
    sets: Sets = None,
    methods: Methods = None,
    k: DraftLengths = None,
    tree: TreeSizes = "0",
    ngram: Ngram = None,
    concurrency: UserCounts = "1,2,4,8,16,32,64",
    max_tokens: MaxAnswerTokens = 512,
    out_folder: OutFolder = Path("bench-results"),
    name: RunName = None,
    limit: TaskLimit = None,
    repeats: Repeats = 3,
    profile: LengthProfile = None,
    score: WithScores = False,
    endpoint: EndpointUrl = None,
    clients: ClientCount = 1,
    model: ServedModel = None,
    api_key: ApiKey = None,
    baseline: BaselineRun = None,
    data: DataFolder = None,
    target: Target = None,
    drafter: Drafters = None,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    ignore_eos: IgnoreEos = False,
    exact: Exact = None,
    warmup: WarmupTokens = 16,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Measure throughput, latency and acceptance of every method, K and load; resume a stopped run.

    The table: c users at a time; tokens/s of all and of one user; TTFT and TPOT in ms, medians;
    AL: acceptance length; same: answers equal to those of `none`.

    Example: peagle bench smollm2-135m --set humaneval -k 3,5,7 --concurrency 1,8,64 --out results
    """
    settings = parse_cells(methods, k, tree, concurrency, endpoint, exact, clients)
    settings = replace(
        settings, max_tokens=max_tokens, repeats=repeats, limit=limit, profile=profile
    )
    settings = replace(
        settings, temperature=temperature, seed=seed, ignore_eos=ignore_eos, warmup=warmup
    )
    if ngram is not None and endpoint is not None:
        raise UserError("--ngram is for peagle's own engine: leave it out with --endpoint")
    settings = replace(settings, ngram=ngram)
    command = bench_command(settings, sets, data, out_folder, name)
    if endpoint is None:
        prepared = prepare_native(command, pair or DEFAULT_PAIR, target, drafter, device, dtype)
    else:
        prepared = prepare_endpoint(command, endpoint, model, api_key, pair)
    run_session(prepared, score, baseline)


def parse_cells(
    methods: str | None,
    k: str | None,
    tree: str,
    concurrency: str,
    endpoint: str | None,
    exact: bool | None,
    clients: int,
) -> "BenchSettings":
    """The settings that decide which cells there are; the sets are looked up later."""
    from peagle.bench.settings import BenchSettings

    names = methods.split(",") if methods else []
    chosen = tuple(dict.fromkeys(parse_method(word.strip()) for word in names))
    trees = parse_trees(tree)
    if endpoint is not None:
        if len(chosen) > 1 or (k is not None and "," in k):
            raise UserError(
                "an endpoint runs one method with one K:"
                " give --methods and -k one of each, or leave both out"
            )
        if any(trees):
            raise UserError("--tree is for peagle's own engine: leave it out with --endpoint")
        if exact is not None:
            raise UserError("--exact is for peagle's own engine: leave it out with --endpoint")
    elif clients != 1:
        raise UserError("--clients is for servers: give --endpoint, or leave it out")
    ks = (0,) if endpoint is not None and k is None else parse_ks(k or DEFAULT_KS)
    counts = parse_counts(concurrency)
    return BenchSettings((), chosen, ks, counts, exact=exact, tree=trees, clients=clients)


def bench_command(
    settings: "BenchSettings", sets: str | None, data: Path | None, out: Path, name: str | None
) -> "BenchCommand":
    from peagle.bench.prepare import BenchCommand

    default_sets = "" if settings.profile else DEFAULT_SETS
    words = tuple(split_words(sets or default_sets))
    return BenchCommand(settings, words, data, out, name, typed_command())


def typed_command() -> str:
    """The command line without its secrets."""
    words = sys.argv[1:]
    shown = [
        "***" if before == "--api-key" else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    shown = ["--api-key=***" if word.startswith("--api-key=") else word for word in shown]
    return shlex.join(["peagle", *(re.sub(r"//[^/@\s]+@", "//***@", word) for word in shown)])
