"""Grammars that answers must follow, and their compilation for one target by llguidance.

    Grammar -> GrammarProbe: tried in a process with limits (the server, for strangers' grammars)
            -> GrammarCompiler: compiled in this process, cached -> a matcher for each request

llguidance comes with the extra `serve`.
"""

from peagle.grammar.compiler import CompiledGrammar, GrammarCompiler
from peagle.grammar.grammar import Grammar

__all__ = ["CompiledGrammar", "Grammar", "GrammarCompiler"]
