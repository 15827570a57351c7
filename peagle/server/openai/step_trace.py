"""The field `peagle` of a streamed event: what one step drafted and accepted."""

from typing import TYPE_CHECKING, Any

from peagle.server.openai.answer import Answer

if TYPE_CHECKING:
    from peagle.engine.stream import StreamPiece


def step_trace(answer: Answer, piece: "StreamPiece") -> dict[str, Any] | None:
    """None: the piece has no tokens."""
    step = piece.step
    if step is None:
        return None
    texts = answer.backend.engines.require_text().texts
    return {
        "accepted": min(step.accepted, len(step.tokens)),
        "drafted": step.drafted,
        "tokens": len(step.tokens),
        "k": answer.slot.k,
        "texts": [texts.text(token) for token in step.tokens],
    }
