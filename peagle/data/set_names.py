"""Names of the benchmark sets that peagle knows."""

SPEED_BENCH = ("speed_bench", *(f"speed_bench_throughput_{size}k" for size in (1, 2, 8, 16, 32)))
SETS = ("humaneval", "mt_bench", "gsm8k", "mbpp", "spec_bench", *SPEED_BENCH)
