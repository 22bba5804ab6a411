"""Structured output: llguidance computes from the tokens so far which may come next.

Grammars are compiled in a separate thread before a step names them.

A matcher's state follows from the tokens of its sequence alone. So replays, forks, drafts and ranks that share a stage
need no extra state. Each one moves its matcher to the position where it draws, and back.
"""

from mlx_ring.worker.grammars.answer_state import Allowed, AnswerGrammar, Drawing, StepMasks, grammar_error
from mlx_ring.worker.grammars.compiler import GrammarCompiler

__all__ = [
    "Allowed",
    "AnswerGrammar",
    "Drawing",
    "GrammarCompiler",
    "StepMasks",
    "grammar_error",
]
