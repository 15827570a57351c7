import json

from peagle.catalog import DEFAULT_PAIR
from peagle.cli import app, err, out
from peagle.cli.options import Device, Dtype, Exact, Json, K, MaxTokens


@app.command()
def demo(
    pair: str = DEFAULT_PAIR,
    k: K = None,
    max_tokens: MaxTokens = 96,
    exact: Exact = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Decode three real prompts with every method of a pair, side by side, and compare.

    Example: peagle demo --max-tokens 64
    """
    from peagle.demo import run, show
    from peagle.loaded import load
    from peagle.pull.progress import shown

    with shown(err) as progress:
        loaded = load(pair, device=device, dtype=dtype, progress=progress)
    runs = run(loaded, k, max_tokens, exact, err)
    if as_json:
        print(json.dumps([row.as_dict() for row in runs.rows], ensure_ascii=False))
    else:
        show(runs, loaded, out)
