"""Ask a demo model the held-out questions with greedy decoding, and print right/total per topic.

python scripts/demo_models/evaluate.py DIR [--seed 0] [--per-topic 30] [--thinking] [--show-wrong]
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from cases import Case
from corpus import DEFAULT_SEED, QUESTIONS_PER_TOPIC, Corpus, Question
from mlx_lm.utils import load

LONGEST_ANSWER = 320
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Marked:
    """Question with the model's answer and its grade."""

    question: Question
    answer: str
    right: bool


def without_reasoning(text: str) -> str:
    """Remove everything up to the end of the reasoning."""
    return text.rpartition("</think>")[2].strip()


def normalized(text: str) -> str:
    """Convert to lower case with single spaces, so that only words count."""
    return " ".join(text.lower().split())


def holds(text: str, words: str) -> bool:
    """Return true if `text` contains `words` as whole words."""
    pattern = r"(?<!\w)" + re.escape(normalized(words)) + r"(?!\w)"
    return re.search(pattern, normalized(text)) is not None


def is_right(case: Case, answer: str) -> bool:
    """Grade an answer: see `Case.grade`."""
    answer = without_reasoning(answer)
    if case.grade == "call":
        return _called(answer) == json.loads(case.expected)
    if case.grade == "text":
        return answer == case.expected
    return holds(answer, case.expected) and not any(holds(answer, wrong) for wrong in case.wrong)


def _called(answer: str) -> object:
    found = TOOL_CALL.search(answer)
    try:
        return json.loads(found.group(1)) if found else None
    except json.JSONDecodeError:
        return None


def ask(folder: Path, questions: Sequence[Question], *, thinking: bool = False) -> list[Marked]:
    """Answer all questions as one batch. Float32, because bfloat16 is slow and imprecise on a CPU."""
    model, tokenizer = load(str(folder))[:2]
    model.set_dtype(mx.float32)
    prompts: list[list[int]] = [
        tokenizer.apply_chat_template(
            list(question.case.prompt),
            tools=list(question.case.tools) or None,
            add_generation_prompt=True,
            enable_thinking=thinking,
        )
        for question in questions
    ]
    # It imports all of transformers, and every process of a run of the tests imports this file.
    from mlx_lm.generate import batch_generate  # pyright: ignore[reportUnknownVariableType] - models are untyped

    answers = batch_generate(model, tokenizer, prompts, max_tokens=LONGEST_ANSWER).texts
    return [
        Marked(question, answer, is_right(question.case, answer))
        for question, answer in zip(questions, answers, strict=True)
    ]


def report(marked: Sequence[Marked]) -> str:
    """Write right/total per topic and overall."""
    topics = dict.fromkeys(one.question.topic for one in marked)
    lines = [_score(topic, [one for one in marked if one.question.topic == topic]) for topic in topics]
    whole = [one for one in marked if one.question.whole]
    pairs = [one for one in marked if not one.question.whole]
    lines += [_score("unseen phrasing", whole), _score("unseen pair", pairs), _score("all", marked)]
    return "\n".join(lines)


def _score(label: str, marked: Sequence[Marked]) -> str:
    right = sum(one.right for one in marked)
    return f"{label:<16} {right:>4} / {len(marked):<4} {right / max(1, len(marked)):7.1%}"


def main() -> None:
    """Read the command line and evaluate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument("--per-topic", type=int, default=QUESTIONS_PER_TOPIC)
    parser.add_argument("--thinking", action="store_true", help="let the model think before it answers")
    parser.add_argument("--show-wrong", action="store_true", help="print every wrong answer")
    arguments = parser.parse_args()
    questions = Corpus(arguments.seed).questions(arguments.per_topic)
    marked = ask(arguments.folder, questions, thinking=arguments.thinking)
    if arguments.show_wrong:
        for one in marked:
            if not one.right:
                print(
                    f"{one.question.case.prompt[-1]['content']!r}: {one.answer!r}, not {one.question.case.expected!r}"
                )
    print(report(marked))


if __name__ == "__main__":
    main()
