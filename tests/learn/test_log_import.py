"""Logs of OpenAI-compatible servers become documents; invalid lines are reported and skipped."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from peagle.errors import UserError
from peagle.learn.folder import LearnFolder, StoreIdentity
from peagle.learn.offline.log_import import LogImport
from peagle.learn.store_reader import read_documents
from tests.support.server.serving import tiny_pair

CHAT = {"messages": [{"role": "user", "content": "w6 w9"}], "temperature": 0.7}
ANSWER = {
    "created": 1700000000,
    "choices": [{"message": {"role": "assistant", "content": "w30 w31"}, "finish_reason": "stop"}],
}
PROMPT_IDS = [94, 6, 9]
ANSWER_IDS = [30, 31, 1]  # with the stop token


def open_folder(root: Path) -> LearnFolder:
    folder = LearnFolder(root / "learn")
    folder.open(StoreIdentity("tiny", None, 96, "0123"))
    return folder


def import_lines(
    root: Path, records: list[Any]
) -> tuple[LogImport, list[str], list[tuple[list[int], list[int]]]]:
    """The import, its reports, and the documents of the store."""
    log = root / "log.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    folder = open_folder(root)
    reports: list[str] = []
    reader = LogImport(folder, tiny_pair().target, reports.append)
    reader.read([log])
    return reader, reports, [(d.prompt, d.answer) for d in read_documents(folder)]


@pytest.mark.parametrize(
    "records",
    [
        [{"request": CHAT, "response": ANSWER}],
        [{"request": {"body": CHAT}, "response": {"status_code": 200, "body": ANSWER}}],
        [{"body": CHAT, "response": {"body": ANSWER}}],
        [{"custom_id": "a", "body": CHAT}, {"custom_id": "a", "response": {"body": ANSWER}}],
        [{"custom_id": "a", "response": {"body": ANSWER}}, {"custom_id": "a", "body": CHAT}],
    ],
)
def test_formats_of_log_records(tmp_path: Path, records: list[Any]) -> None:
    reader, reports, documents = import_lines(tmp_path, records)
    assert documents == [(PROMPT_IDS, ANSWER_IDS)] and not reports
    assert reader.counts.documents == 1


def test_completions_content_parts_and_token_ids(tmp_path: Path) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "w6 w9"}]}]
    cut = {"choices": [{"text": "w40", "finish_reason": "length"}]}
    ids = {"prompt_token_ids": [7, 8], "choices": [{"text": "?", "token_ids": [50, 51]}]}
    records = [
        {"request": {"messages": parts}, "response": ANSWER},
        {"request": {"prompt": "w6 w9"}, "response": cut},
        {"request": {"prompt": [10, 11]}, "response": cut},
        {"request": {"prompt": "text"}, "response": ids},
    ]
    _, reports, documents = import_lines(tmp_path, records)
    assert not reports
    assert documents == [
        (PROMPT_IDS, ANSWER_IDS),
        ([6, 9], [40]),
        ([10, 11], [40]),
        ([7, 8], [50, 51]),
    ]


def test_invalid_lines_are_reported_and_skipped(tmp_path: Path) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]
    records = [
        {"request": CHAT, "response": ANSWER},
        {"id": "a chunk of a stream"},
        {"request": CHAT, "response": {"error": {"message": "no"}}},
        {"request": {"messages": image}, "response": ANSWER},
        {"request": {"prompt": [999]}, "response": ANSWER},
        {"request": CHAT | {"tools": [{}]}, "response": ANSWER},
        {"body": CHAT, "response": {"status_code": 500, "body": {}}},
        {"custom_id": "alone", "body": CHAT},
    ]
    reader, reports, documents = import_lines(tmp_path, records)
    assert len(documents) == 1 and reader.counts.skipped == len(reports) == 7
    for number, reason in enumerate(
        ("`request` and `response`", "no `choices`", "not text", "outside", "tools", "status 500"),
        start=2,
    ):
        assert f"log.jsonl:{number}: skipped" in reports[number - 2]
        assert reason in reports[number - 2]
    assert "1 requests or responses of batches lack" in reports[-1]


def test_a_log_is_imported_once(tmp_path: Path) -> None:
    records = [{"request": CHAT, "response": ANSWER}]
    import_lines(tmp_path, records)
    reader, _, documents = import_lines(tmp_path, records)
    assert len(documents) == 1 and reader.counts.known == 1


def test_a_log_without_answers_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no answered request \(1 lines skipped\)"):
        import_lines(tmp_path, [{"id": 1}])


def test_gzipped_logs_are_read(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl.gz"
    log.write_bytes(gzip.compress(json.dumps({"request": CHAT, "response": ANSWER}).encode()))
    reader = LogImport(open_folder(tmp_path), tiny_pair().target)
    reader.read([log])
    assert reader.counts.documents == 1
