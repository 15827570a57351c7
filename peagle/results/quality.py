"""OutputCheck and Score: whether answers are the same as without drafts, and correct."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from peagle.results.json_values import as_float, as_int, as_list, as_object, as_text
from peagle.results.key import is_count


@dataclass(frozen=True, slots=True)
class AnswerDifference:
    """The first token at which an answer differs from that of `none`."""

    task: str
    turn: int | None
    position: int | None  # of the token
    margin: float | None  # gap of the two tokens' log-probabilities under the target

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "AnswerDifference":
        return cls(
            as_text(raw.get("task")) or "a task",
            as_int(raw.get("turn")),
            as_int(raw.get("at")),
            as_float(raw.get("margin")),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "turn": self.turn,
            "at": self.position,
            "margin": self.margin,
        }


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """The answers of a cell against those of plain decoding: `none`, at the lowest concurrency."""

    compared: int
    identical: int
    differences: tuple[AnswerDifference, ...] = ()  # the first ones
    baseline_concurrency: int | None = None  # of `none`; files of older versions lack it

    @classmethod
    def from_json(cls, raw: Any) -> "OutputCheck | None":
        check = as_object(raw)
        if not check:
            return None
        return cls(
            as_int(check.get("compared")) or 0,
            as_int(check.get("identical")) or 0,
            tuple(
                AnswerDifference.from_json(as_object(item))
                for item in as_list(check.get("differences"))
            ),
            as_int(check.get("baseline_concurrency")),
        )

    @classmethod
    def merge(cls, checks: "Iterable[OutputCheck | None]") -> "OutputCheck | None":
        """The sum of several cells."""
        known = [check for check in checks if check is not None]
        if not known:
            return None
        baselines = {check.baseline_concurrency for check in known}
        return cls(
            sum(check.compared for check in known),
            sum(check.identical for check in known),
            tuple(difference for check in known for difference in check.differences),
            baselines.pop() if len(baselines) == 1 else None,
        )

    def to_json(self) -> dict[str, Any]:
        baseline = self.baseline_concurrency
        return {
            "compared": self.compared,
            "identical": self.identical,
            "differences": [difference.to_json() for difference in self.differences],
            **({} if baseline is None else {"baseline_concurrency": baseline}),
        }


@dataclass(frozen=True, slots=True)
class Score:
    """The share of a set's tasks that a method answers correctly."""

    set: str
    method: str
    k: int | str
    tree: int
    metric: str  # pass@1 or accuracy
    value: float  # in 0..1
    of: int  # tasks

    @classmethod
    def from_json(cls, raw: Any) -> "Score | None":
        """None where the object does not say what it scored. Old files do not name the tree."""
        score = as_object(raw)
        names = [as_text(score.get(name)) for name in ("set", "method", "metric")]
        k = score.get("k")
        tree = score.get("tree", 0)
        value = as_float(score.get("value"))
        of = as_int(score.get("of"))
        if not all(names) or value is None or of is None or not is_count(tree, 0):
            return None
        if not (k == "auto" or is_count(k, 0)):
            return None
        set_name, method, metric = (str(name) for name in names)
        return cls(set_name, method, k, tree, metric, value, of)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
