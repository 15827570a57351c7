"""The fuzz: random requests to random engines, each answer compared with plain decoding.

draw.py draws a FuzzCase (case.py) from a seed, run.py runs it and compares (outcome.py), shrink.py
looks for the smallest case that still fails. `make fuzz` (__main__.py) does so for minutes.
"""
