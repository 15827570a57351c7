"""The fuzzer: random requests to random engines, whose answers are compared with plain decoding.

draw.py draws a FuzzCase (case.py) from a seed, run.py runs it and compares (outcome.py), shrink.py
searches for the smallest case that still fails. `make fuzz` (__main__.py) runs cases for minutes.
"""
