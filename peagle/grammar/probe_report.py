"""ProbeReport: what came of trying a grammar, and the limits under which it was tried."""

from dataclasses import dataclass

# Ordinary schemas take milliseconds, a schema of 200,000 characters 0.2 s.
CPU_SECONDS = 3
MEMORY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ProbeReport:
    problem: str = ""  # Why the grammar cannot be used; "": it can.
    memory_bytes: int = 0  # What the compiled grammar occupies.
    lark: str = ""  # The grammar in Lark's notation, if it is one of rules.
