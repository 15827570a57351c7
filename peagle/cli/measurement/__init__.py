"""Commands that measure: evaluate, bench, report, compare, cost, tune, bench-step."""
