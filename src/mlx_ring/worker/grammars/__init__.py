"""Answers under a grammar: which tokens may come next, told by llguidance from the tokens so far.

Grammars are compiled before a step names them, in a thread of their own.

A matcher's place follows from the tokens of its sequence alone, so replays, forks, drafts and ranks that share a stage
need nothing of their own: each brings its matcher to where it draws, and back.
"""

from mlx_ring.worker.grammars.answer import AnswerGrammar, grammar_error
from mlx_ring.worker.grammars.compiler import GrammarCompiler
from mlx_ring.worker.grammars.masks import Allowed, Drawing, StepMasks, make_masks

__all__ = [
    "Allowed",
    "AnswerGrammar",
    "Drawing",
    "GrammarCompiler",
    "StepMasks",
    "grammar_error",
    "make_masks",
]
