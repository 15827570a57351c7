"""Regenerated answers: exact ids, resumed runs, dropped records."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from peagle.cli import app
from peagle.data.chat import encode_prompt
from peagle.errors import UserError
from peagle.regenerate import invent
from peagle.regenerate.answers import ANSWERS
from peagle.regenerate.job import RegenerateSettings, regenerate
from peagle.regenerate.prompts import (
    Prompt,
    parse_temperatures,
    read_prompts,
    split_validation,
)
from peagle.target import Target
from tests.support.models.chat_targets import TEMPLATE, make_chat_target, plain
from tests.support.models.tiny_models import make_target

# A template that omits earlier answers.
STATELESS_TEMPLATE = TEMPLATE.replace("<bot> {{ m['content'] }} w1", "<bot> w1")
SETTINGS = RegenerateSettings(max_tokens=24, max_prompt=60, slots=3)


@pytest.fixture(scope="module")
def chat() -> Target:
    return make_chat_target()


def some(turns: int = 1, count: int = 20) -> list[Prompt]:
    return [
        Prompt(f"{i}@0", "test", [f"w{3 + i} w{40 + i + 7 * t}" for t in range(turns)], 0.0)
        for i in range(1, count + 1)
    ]


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / ANSWERS).read_text().splitlines()]


def test_answers_are_the_targets_own_ids(chat: Target, tmp_path: Path) -> None:
    counts = regenerate(chat, some(), tmp_path, SETTINGS)
    written = {line["key"]: line for line in lines(tmp_path)}
    assert set(written) == {prompt.key for prompt in some()}
    assert counts.answered + counts.dropped.total() == 20 and counts.answered > 5
    for prompt in some():
        line, ids = (
            written[prompt.key],
            encode_prompt(chat, [{"role": "user", "content": prompt.turns[0]}]),
        )
        answer = plain(chat, ids, SETTINGS.max_tokens)
        if "dropped" in line:
            assert line["dropped"] == ("empty" if answer == [1] else "truncated")
            continue
        assert line["ids"] == ids + answer
        assert line["spans"] == [[len(ids), len(ids) + len(answer)]]
        assert (line["source"], line["temperature"]) == ("test", 0.0)
        assert line["messages"][1] == {
            "role": "assistant",
            "content": chat.tokenizer.decode(answer[:-1]),
        }
    kept = [line for line in written.values() if "ids" in line]
    assert counts.tokens == sum(end - start for line in kept for start, end in line["spans"])
    assert counts.generated >= counts.tokens and counts.tokens_per_second > 0
    assert json.loads((tmp_path / "regenerate.json").read_text())["max_tokens"] == 24


def test_later_turns_extend_the_record(chat: Target, tmp_path: Path) -> None:
    """The second prompt starts with all ids so far, so one record has both answers."""
    regenerate(chat, some(turns=2), tmp_path, SETTINGS)
    grown = [line for line in lines(tmp_path) if len(line.get("spans", [])) == 2]
    assert len(grown) > 2
    for line in grown:
        assert [message["role"] for message in line["messages"]] == ["user", "assistant"] * 2
        for turn, (start, end) in enumerate(line["spans"]):
            assert line["ids"][:start] == encode_prompt(chat, line["messages"][: 2 * turn + 1])
            assert line["ids"][start:end] == plain(chat, line["ids"][:start], SETTINGS.max_tokens)
    cut = [line for line in lines(tmp_path) if "cut" in line]
    assert cut and all(len(line["spans"]) == 1 and len(line["messages"]) == 2 for line in cut)


def test_a_template_that_rewrites_history_gives_a_record_per_turn(tmp_path: Path) -> None:
    target = make_chat_target(STATELESS_TEMPLATE)
    regenerate(target, some(turns=2), tmp_path, SETTINGS)
    second = [line for line in lines(tmp_path) if line["key"].endswith("#2")]
    assert len(second) > 2
    for line in second:
        ((start, end),) = line["spans"]
        assert line["part"] == [2, 2] and len(line["messages"]) == 4
        assert line["ids"][:start] == encode_prompt(target, line["messages"][:3])
        assert line["ids"][start:end] == plain(target, line["ids"][:start], SETTINGS.max_tokens)
    whole = (tmp_path / ANSWERS).read_bytes()
    # If the second part of a conversation is lost, both parts are generated again.
    at = whole.index(second[-1]["key"].encode()) - 9
    (tmp_path / ANSWERS).write_bytes(whole[:at])
    regenerate(target, some(turns=2), tmp_path, SETTINGS)
    assert sorted((tmp_path / ANSWERS).read_bytes().splitlines()) == sorted(whole.splitlines())


@pytest.mark.parametrize("torn", [0, 1, 30])
def test_resuming_keeps_complete_records(chat: Target, tmp_path: Path, torn: int) -> None:
    regenerate(chat, some(), tmp_path / "whole", SETTINGS)
    whole = (tmp_path / "whole" / ANSWERS).read_bytes().splitlines(keepends=True)
    regenerate(chat, some(), tmp_path / "killed", SETTINGS)
    (tmp_path / "killed" / ANSWERS).write_bytes(b"".join(whole[:8]) + whole[8][:torn])
    counts = regenerate(chat, some(), tmp_path / "killed", SETTINGS)
    assert counts.resumed == 8 and counts.answered + counts.dropped.total() == 12
    again = (tmp_path / "killed" / ANSWERS).read_bytes().splitlines(keepends=True)
    assert again[:8] == whole[:8] and sorted(again) == sorted(whole)
    assert regenerate(chat, some(), tmp_path / "killed", SETTINGS).as_dict()["answered"] == 0


def test_an_interrupted_job_keeps_its_records(chat: Target, tmp_path: Path) -> None:
    def interrupt(done: int, total: int, tokens: int) -> None:
        if done >= 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regenerate(chat, some(), tmp_path, SETTINGS, interrupt)
    before = lines(tmp_path)
    assert 5 <= len(before) < 20
    assert regenerate(chat, some(), tmp_path, SETTINGS).resumed == len(before)
    assert lines(tmp_path)[: len(before)] == before and len(lines(tmp_path)) == 20


def test_other_settings_are_refused(chat: Target, tmp_path: Path) -> None:
    regenerate(chat, some(count=2), tmp_path, SETTINGS)
    for other, word in [
        (RegenerateSettings(max_tokens=25, max_prompt=60), "max_tokens 24, and now it is 25"),
        (RegenerateSettings(max_tokens=24, max_prompt=60, temperatures=(0.0, 0.8)), "temperatures"),
        (RegenerateSettings(max_tokens=24, max_prompt=60, prompts="other"), "prompts"),
    ]:
        with pytest.raises(UserError, match=word):
            regenerate(chat, some(), tmp_path, other)
    regenerate(
        chat, some(count=3), tmp_path, RegenerateSettings(max_tokens=24, max_prompt=60, slots=1)
    )
    (tmp_path / ANSWERS).write_text("no json\n")
    with pytest.raises(UserError, match=r"answers.jsonl:1 is not an answer"):
        regenerate(chat, some(), tmp_path, SETTINGS)
    (tmp_path / "regenerate.json").unlink()
    with pytest.raises(UserError, match=r"no regenerate\.json"):
        regenerate(chat, some(), tmp_path, SETTINGS)


def test_prompts_that_cannot_be_used_are_counted(chat: Target, tmp_path: Path) -> None:
    prompts = [
        Prompt("1@0", "", ["w66"], 0.0),
        Prompt("2@0", "", ["w7 " * 70], 0.0),
        *some(count=4),
    ]
    counts = regenerate(chat, prompts, tmp_path, SETTINGS)
    assert counts.dropped["template"] == 1 and counts.dropped["too long"] == 1
    assert {"key": "1@0", "dropped": "template"} in lines(tmp_path)
    assert regenerate(chat, prompts, tmp_path, SETTINGS).resumed == 6
    with pytest.raises(UserError, match="leaves no room"):
        regenerate(chat, prompts, tmp_path / "b", RegenerateSettings(max_tokens=256))
    bare = make_target()
    with pytest.raises(UserError, match="no chat template"):
        regenerate(bare, prompts, tmp_path / "c", SETTINGS)
    assert (
        bare.model.config._attn_implementation == chat.model.config._attn_implementation == "sdpa"
    )


def test_looping_answers_are_dropped(tmp_path: Path) -> None:
    target = make_chat_target()
    target.model.generation_config.eos_token_id = None
    target.model.config.eos_token_id = None
    counts = regenerate(
        target, some(count=4), tmp_path, RegenerateSettings(max_tokens=150, max_prompt=60)
    )
    assert counts.answered == 0 and counts.dropped["looping"] >= 1
    assert set(counts.dropped) <= {"looping", "truncated"}


def test_reading_prompts(tmp_path: Path) -> None:
    path, messages = tmp_path / "p.jsonl", list[str]()
    records = [
        '{"prompt": "a"}',
        "{broken",
        '{"turns": ["b", "c"], "source": "set"}',
        '{"turns": []}',
        '{"prompt": "d"}',
    ]
    path.write_text("\n".join(records))
    prompts = read_prompts(path, (0.0, 0.8), report=messages.append)
    assert [prompt.key for prompt in prompts] == ["1@0", "1@0.8", "3@0", "3@0.8", "5@0", "5@0.8"]
    assert prompts[2] == Prompt("3@0", "set", ["b", "c"], 0.0) and prompts[0].source == "p.jsonl"
    assert len(messages) == 2 and f"{path}:2" in messages[0] and f"{path}:4" in messages[1]
    shuffled = [read_prompts(path, seed=seed)[0].key for seed in range(8)]
    assert len(set(shuffled)) > 1 and shuffled[0] == read_prompts(path, seed=0, limit=1)[0].key
    with pytest.raises(UserError, match="more than 0"):
        read_prompts(path, max_broken=0)
    path.write_text('{"text": "x"}\n')
    with pytest.raises(UserError, match="holds no prompt"):
        read_prompts(path)


def test_validation_prompts_depend_on_the_texts_only() -> None:
    prompts = [*some(count=30), Prompt("31@0", "again", some(count=30)[4].turns, 0.0)]
    training, validation = split_validation(prompts, 10)
    texts = {tuple(prompt.turns) for prompt in validation}
    assert len(texts) == 10 and len(training) + len(validation) == 31
    assert not texts & {tuple(prompt.turns) for prompt in training}
    assert {tuple(p.turns) for p in split_validation(prompts[::-1], 10)[1]} == texts
    fewer = {tuple(p.turns) for p in split_validation(prompts, 4)[1]}
    assert len(fewer) == 4 and fewer < texts
    with pytest.raises(UserError, match="leaves none of 30 prompts"):
        split_validation(prompts, 30)


def test_temperatures() -> None:
    assert parse_temperatures("0,0.8") == (0.0, 0.8)
    for wrong in ("hot", "0,0", "-1", ""):
        with pytest.raises(UserError):
            parse_temperatures(wrong)


def test_invented_prompts(chat: Target, tmp_path: Path) -> None:
    header, tail = invent.user_frame(chat)
    assert (header, tail) == ([93], "<end>")
    path = invent.invent(chat, 6, tmp_path, slots=8)
    first = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
    assert (
        len(set(first)) == 6
        and all(first)
        and not any("<end>" in text or "w1 " in text for text in first)
    )
    with path.open("a") as file:
        file.write('{"prompt": "torn')
    invent.invent(chat, 9, tmp_path, slots=8)
    again = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
    assert again[:6] == first and len(set(again)) == 9
    before = path.read_bytes()
    invent.invent(chat, 9, tmp_path)
    assert path.read_bytes() == before


def test_the_command(tmp_path: Path) -> None:
    target = make_chat_target()
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": prompt.turns[0]}) + "\n" for prompt in some()) + "{broken\n"
    )

    def run(*words: object, code: int = 0) -> str:
        common = [
            "regenerate",
            "--target",
            tmp_path / "target",
            "--out",
            tmp_path / "out",
            "--dtype",
            "float32",
        ]
        more = ["--device", "cpu", "--max-tokens", "24", "--slots", "4"]
        result = CliRunner().invoke(app, [str(word) for word in (*common, *more, *words)])
        assert result.exit_code == code, result.output + repr(result.exception)
        return result.stdout if code == 0 else result.stderr

    first = json.loads(run("--prompts", prompts, "--limit", 5, "--json"))
    assert first["answered"] + sum(first["dropped"].values()) == 5 and first["resumed"] == 0
    output = run("--prompts", prompts)
    assert "5 resumed" in output and "tokens/s" in output
    assert len(lines(tmp_path / "out")) == 20
    more = json.loads(run("--prompts", prompts, "--invent", 3, "--json"))
    assert more["resumed"] == 20 and more["answered"] + sum(more["dropped"].values()) == 3
    assert "invented:" in lines(tmp_path / "out")[-1]["key"]
    assert "was started with temperatures" in run(
        "--prompts", prompts, "--temperature", "0,1", code=2
    )
    assert "was started with validation" in run("--prompts", prompts, "--validation", 3, code=2)
    assert not (tmp_path / "out" / "validation.jsonl").exists()
    assert "--long 100000 exceeds" in run("--invent", 500_000, "--long", 100_000, code=2)
    other = tmp_path / "other"
    run("--prompts", prompts, "--validation", 3, "--out", other)
    held_out = read_prompts(other / "validation.jsonl")
    answered = {line["messages"][0]["content"] for line in lines(other) if "messages" in line}
    assert len(held_out) == 3 and len(lines(other)) == 17
    assert not answered & {prompt.turns[0] for prompt in held_out}
    assert "was started with validation 3" in run("--prompts", prompts, "--out", other, code=2)
    run("--prompts", prompts, "--validation", 5, "--out", other, code=2)
    assert read_prompts(other / "validation.jsonl") == held_out, (
        "a refused run must not change the file"
    )
    limited = tmp_path / "limited"
    options = ("--validation", 3, "--limit", 4, "--seed", 5, "--temperature", "0,1")
    run("--prompts", prompts, *options, "--out", limited)
    texts = [{p.turns[0] for p in read_prompts(o / "validation.jsonl")} for o in (other, limited)]
    assert texts[0] == texts[1], "--limit and --seed must not change the held-out prompts"
    assert len(lines(limited)) == 4 * 2
    assert "give --prompts FILE" in run("--invent", 3, "--validation", 2, code=2)
    assert "--validation is -1" in run("--prompts", prompts, "--validation", -1, code=2)
    assert "nothing to answer" in run(code=2)
    assert "--slots" in run("--prompts", prompts, "--slots", "many", code=2)
