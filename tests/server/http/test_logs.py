"""Log lines contain no control characters of terminals."""

import json
import logging

import pytest

from peagle.server.http.logs import JsonFormatter, encode_line, log_worker_line

UNSAFE = [
    *map(chr, range(0x20)),
    *map(chr, range(0x7F, 0xA0)),
    *"\u061c\u200b\u200e\u200f\u2028\u2029\u202a\u202e\u2066\u2069\ufeff\ud800\udfff\U000e0041",
]


@pytest.mark.parametrize("character", UNSAFE, ids=lambda character: f"{ord(character):x}")
def test_unprintable_characters_are_escaped(character: str) -> None:
    line = {"path": f"/a{character}b", character: "key"}
    text = encode_line(line)
    assert character not in text and text.isprintable()
    assert json.loads(text) == line


def test_printable_text_stays_readable() -> None:
    assert encode_line({"prompt": "Grüße, 漢字 😀"}) == '{"prompt": "Grüße, 漢字 😀"}'


def test_every_line_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.LogRecord("peagle.server", logging.INFO, "", 0, "csi \x9b31m", None, None)
    assert "\x9b" not in JsonFormatter().format(record)
    log_worker_line(json.dumps({"event": "csi \x9b31m"}, ensure_ascii=False), "0")
    assert "\x9b" not in capsys.readouterr().err
