"""The demo: three prompts with every method, accepted drafts in color, and a table at the end."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from peagle.core import Generation, Method
from peagle.loaded import LoadedPair

PROMPTS = {
    "chat": "I have a job interview tomorrow and I am nervous. What should I do tonight?",
    "code": "Write a Python function that returns the n-th Fibonacci number without recursion,"
    " with a docstring.",
    "summary": "Summarize in two sentences: The Great Barrier Reef, off the coast of Queensland, is"
    " the world's largest coral reef system. It is made of over 2,900 reefs and 900 islands."
    " Warming seas have bleached large parts of it five times since 1998, and farm runoff and"
    " crown-of-thorns starfish do further damage. Australia has pledged billions to improve water"
    " quality, but scientists say only lower emissions can save the reef.",
}
WARM_UP_TOKENS = 8
MIN_SPEED = 1e-9  # Tokens per second; avoids a division by zero.


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One method over all prompts."""

    method: Method
    trained: bool
    answers: dict[str, Generation]
    ratio: float
    identical: bool

    @property
    def tokens_per_second(self) -> float:
        return decoding_speed(self.answers.values())

    @property
    def acceptance_length(self) -> float:
        steps = [step for answer in self.answers.values() for step in answer.steps if step.drafted]
        return 1 + sum(step.accepted for step in steps) / len(steps) if steps else 1.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "trained": self.trained,
            "tokens_per_second": round(self.tokens_per_second, 2),
            "ratio_to_none": round(self.ratio, 3),
            "acceptance_length": round(self.acceptance_length, 3),
            "identical": self.identical,
            "answers": {name: answer.as_dict() for name, answer in self.answers.items()},
        }


def run_demo(
    loaded: LoadedPair, k: int | None, max_tokens: int, exact: bool | None, console: Console
) -> list[DemoRow]:
    """Methods take turns on each prompt, so that noise on the machine affects all of them.

    Beside trained drafters, untrained ones are left out.
    """
    trained = [method for method in loaded.pair.drafters if loaded.drafter(method).config.trained]
    methods: list[Method] = ["none", *(trained or loaded.pair.drafters)]
    answers: dict[Method, dict[str, Generation]] = {method: {} for method in methods}
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("decoding", total=len(PROMPTS) * len(methods))
        for method in methods:  # The first pass is slow: it allocates memory and starts threads.
            loaded.generate("Hello", k=k, method=method, exact=exact, max_tokens=WARM_UP_TOKENS)
        for name, prompt in PROMPTS.items():
            for method in methods:
                answers[method][name] = loaded.generate(prompt, k, method, max_tokens, exact=exact)
                bar.advance(task)
    baseline = answers["none"]
    return [compare(method, generated, baseline) for method, generated in answers.items()]


def compare(
    method: Method, answers: dict[str, Generation], baseline: dict[str, Generation]
) -> DemoRow:
    baseline_speed = decoding_speed(baseline.values())
    return DemoRow(
        method=method,
        trained=all(answer.trained for answer in answers.values()),
        answers=answers,
        ratio=decoding_speed(answers.values()) / max(baseline_speed, MIN_SPEED),
        identical=all(answers[name].token_ids == baseline[name].token_ids for name in PROMPTS),
    )


def decoding_speed(answers: Iterable[Generation]) -> float:
    """Tokens per second of decoding: prefills and the tokens they give are not counted."""
    answers = list(answers)
    seconds = sum(answer.seconds - answer.prefill_seconds for answer in answers)
    return sum(len(answer.token_ids) - 1 for answer in answers) / max(seconds, 1e-9)


def show_demo(rows: list[DemoRow], loaded: LoadedPair, console: Console) -> None:
    for row in rows[1:]:
        for name, answer in row.answers.items():
            title = (
                f"{name}, {row.method} {answer.shape_text}: {len(answer.token_ids)} tokens"
                f" in {len(answer.steps)} steps"
            )
            console.print(Panel(color_drafts(answer, loaded), title=title, title_align="left"))
    first = rows[0].answers["chat"]
    precision = f"{first.dtype}, exact" if first.exact else first.dtype
    console.print(f"[green]green[/]: accepted drafts; plain: the target's own tokens. {precision}.")
    if (choice := loaded.target.speed_choice) is not None:
        console.print(f"[dim]measured on this CPU: {choice.text}[/]", highlight=False)
    console.print(comparison_table(rows))
    if untrained := [row.method for row in rows if not row.trained]:
        console.print(
            f"[yellow]The drafters for {' and '.join(untrained)} are untrained: their drafts are"
            " noise, almost none is accepted, and drafting only costs time. The demo shows that"
            " the answers stay the same.[/]"
        )


def comparison_table(rows: list[DemoRow]) -> Table:
    table = Table("method", "tokens/s", "ratio to none", "acceptance length", "identical")
    for row in rows:
        table.add_row(
            row.method if row.trained else f"{row.method} (untrained)",
            f"{row.tokens_per_second:.1f}",
            f"{row.ratio:.2f}",
            f"{row.acceptance_length:.2f}",
            "yes" if row.identical else "no",
        )
    return table


def color_drafts(answer: Generation, loaded: LoadedPair) -> Text:
    """The answer with its accepted drafts in green, cut where the text of a prefix ends."""
    text = Text()
    shown = ""
    for end, accepted in enumerate(answer.from_draft, start=1):
        prefix = loaded.decode(answer.token_ids[:end])
        if not prefix.endswith("\ufffd"):  # It ends in the middle of a character.
            text.append(prefix[len(shown) :], style="green" if accepted else "")
            shown = prefix
    return text.append(answer.text[len(shown) :])
