"""What runs inside the sandbox, with the standard library only and few imports: start-up counts.

main.py starts as one process and forks: candidate.py runs the program that a model wrote, judge.py
runs the test and decides. They share two pipes, and nothing else.
"""
