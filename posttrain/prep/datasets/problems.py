r"""What sets of mathematical problems share: columns under many names, the form of the answer, a worked solution."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from posttrain.core.errors import DataError
from posttrain.core.types import Message, Score
from posttrain.data.parquet import Conversation
from posttrain.prep.datasets.base import FileSet, RawRow
from posttrain.rewards import compute_score
from posttrain.rewards.boxed import last_boxed


@dataclass(frozen=True)
class AnswerForm:
    """How a prompt asks for the answer, and how a response then gives it, as its grader reads it."""

    prompt: str
    """With ``{problem}`` where the problem stands."""
    answer: str
    """With ``{answer}`` where the answer stands."""
    closing: str
    """The last paragraph of a worked solution that does not have the answer in this form."""

    def ask(self, problem: str) -> str:
        return self.prompt.replace("{problem}", problem)

    def show(self, answer: str) -> str:
        return self.answer.replace("{answer}", answer)

    def close(self, solution: str, answer: str) -> str:
        """The solution, ending with the answer in this form."""
        if "boxed" in self.answer and last_boxed(solution):
            return solution
        return f"{solution}\n\n{self.closing.replace('{answer}', answer)}"


BOXED = AnswerForm(
    "{problem} Let's think step by step and output the final answer within \\boxed{}.",
    r"\boxed{{answer}}",
    r"The final answer is $\boxed{{answer}}$.",
)
"""verl's instruction for MATH."""
BOXED_CHINESE = AnswerForm(
    "{problem}\n请逐步推理,并把最终答案写在 \\boxed{} 中。", r"\boxed{{answer}}", r"最终答案是 $\boxed{{answer}}$。"
)
ANSWER_LINE = AnswerForm(
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
    'Remember to put your answer on its own line after "Answer:".',
    "Answer: {answer}",
    "Answer: {answer}",
)
"""DAPO's instruction (arXiv:2503.14476), which the grader ``math_dapo`` belongs to."""


_SHOWN = 100
"""Characters of an answer that a message shows."""
_WORDS_OF_AN_ANSWER = 15
"""Most words that a final answer has, as "all even integers". The longest of MATH has three."""
_WORD = re.compile(r"(?<![\\a-zA-Z])[^\W\d_]{2,}")
"""A word; names of LaTeX commands are none."""
_WORKED = ("####", "<<", "\\boxed", "\\fbox")
"""What stands in worked solutions, and in no final answer."""
_WHOLE_NUMBER = re.compile(r"-?\d+")


class MathProblems(FileSet):
    """Rows with a problem, an answer and perhaps a worked solution, under any of the names in the columns below.

    The solution, ended in the set's form, is what SFT imitates and what ``check`` grades.
    """

    ability: ClassVar[str] = "math"
    form: ClassVar[AnswerForm] = BOXED
    problem_columns: ClassVar[Sequence[str]] = ("problem", "question", "input", "prompt", "Problem")
    answer_columns: ClassVar[Sequence[str]] = ("answer", "final_answer", "ground_truth", "output", "golden", "Answer")
    solution_columns: ClassVar[Sequence[str]] = ("solution", "Solution")
    kept_columns: ClassVar[Sequence[str]] = ("level", "type", "subject", "difficulty", "topic", "unique_id", "url")
    """Go into ``extra_info`` under their own names."""
    whole_numbers: ClassVar[bool] = False
    """True where every answer of the set is a whole number."""

    def problem(self, row: RawRow) -> str:
        """The problem. Raises ``DataError`` if there is none."""
        text = first(row, self.problem_columns)
        if not isinstance(text, str) or not text.strip():
            looked = f"looked for {', '.join(self.problem_columns)}; the row has {', '.join(row)}"
            raise DataError("the problem is missing or empty", hint=looked)
        return text.strip()

    def gold(self, row: RawRow) -> str:
        """The answer; where no column has it, the last box of the solution. Raises ``DataError`` if there is none."""
        value = first(row, self.answer_columns)
        if value is None:
            value = last_boxed(self.solution(row) or "")
        text = plain(value)
        if not text:
            raise DataError("the gold answer is missing or empty", hint=f"the row has {', '.join(row)}")
        return text

    def solution(self, row: RawRow) -> str | None:
        """The worked solution, if there is one."""
        text = first(row, self.solution_columns)
        return text.strip() if isinstance(text, str) and text.strip() else None

    def source_of(self, row: RawRow) -> str:
        """The row's data source."""
        return self.data_source

    def to_rlhf(self, row: RawRow, index: int, split: str) -> dict[str, Any]:
        gold, problem = self.gold(row), self.problem(row)
        kept = {name: row[name] for name in self.kept_columns if row.get(name) is not None}
        return {
            "data_source": self.source_of(row),
            "prompt": self.prompt(row),
            "ability": self.ability,
            "reward_model": {"style": "rule", "ground_truth": gold},
            "extra_info": {
                "split": split,
                "index": index,
                "answer": self.solution(row) or gold,
                "question": problem,
                **kept,
            },
        }

    def prompt(self, row: RawRow) -> list[Message]:
        """The messages that ask the problem."""
        return [{"role": "user", "content": self.form.ask(self.problem(row))}]

    def to_sft(self, row: RawRow, index: int, split: str) -> Conversation | None:
        solution = self.solution(row)
        if solution is None:
            return None
        worked: Message = {"role": "assistant", "content": self.form.close(solution, self.gold(row))}
        return Conversation([*self.prompt(row), worked])

    def check(self, row: RawRow) -> Score:
        gold, solution = self.gold(row), self.solution(row)
        check_answer(gold, whole_number=self.whole_numbers)
        self.prompt(row)
        response = self.form.show(gold) if solution is None else self.form.close(solution, gold)
        return compute_score(self.source_of(row), response, gold)


def check_answer(gold: str, *, whole_number: bool = False) -> None:
    """Raise ``DataError`` for a gold answer that is no final answer: a worked solution, or, with ``whole_number``,
    anything but that."""
    if whole_number and not _WHOLE_NUMBER.fullmatch(gold):
        raise DataError(
            "the gold answer is no whole number, as the answers of this set are", hint=f"it is {_cut(gold)}"
        )
    if any(mark in gold for mark in _WORKED) or len(_WORD.findall(gold)) > _WORDS_OF_AN_ANSWER:
        raise DataError(
            "the gold answer is a worked solution and not a final answer: is this a file of another set?",
            hint=f"it is {_cut(gold)}",
        )


def _cut(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def given_prompt(row: RawRow) -> list[Message] | None:
    """The messages of a row in verl's shape, as they are but for ``without_figures``; None where there are none.

    Raises:
        DataError: a message has no role or no text.
    """
    prompt = row.get("prompt")
    if not isinstance(prompt, list):
        return None
    messages: list[Message] = []
    for message in prompt:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
        if role not in ("system", "user", "assistant") or not isinstance(content, str):
            raise DataError("a message of the prompt has no role or no text", hint=f"it is {str(message)[:80]}")
        messages.append({"role": role, "content": without_figures(content)})
    return messages


def last_question(messages: Sequence[Message]) -> str:
    """The last user message, without blanks around it; empty where there is none."""
    return next((message["content"].strip() for message in reversed(messages) if message["role"] == "user"), "")


def problem_text(row: RawRow, columns: Sequence[str]) -> str:
    """Return the last question of a row in verl's shape, of another the text of the first of these columns that has a
    value. Raises ``DataError`` if it is missing or empty."""
    given = given_prompt(row)
    text = first(row, columns) if given is None else last_question(given)
    if not isinstance(text, str) or not text.strip():
        raise DataError("the problem is missing or empty", hint=f"the row has {', '.join(row)}")
    return text


def given_truth(row: RawRow) -> Any:
    """The ground truth of a row in verl's shape, None where there is none."""
    model = row.get("reward_model")
    return model.get("ground_truth") if isinstance(model, Mapping) else None


def without_figures(text: str) -> str:
    """A text whose figures were lost, with ``[figure]`` for ``<image>``: that word asks for an image of the row."""
    return text.replace("<image>", "[figure]")


def first(row: Mapping[str, Any], columns: Sequence[str]) -> Any:
    """The value of the first of these columns that has one."""
    return next((row[name] for name in columns if row.get(name) is not None), None)


def plain(value: Any) -> str:
    """An answer as text: ``27.0`` is "27", and dollar signs around the whole are typesetting."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value if value is not None else "").strip()
    if len(text) > 1 and text[0] == text[-1] == "$" and "$" not in text[1:-1]:
        text = text[1:-1].strip()
    return text
