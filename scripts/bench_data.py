"""Rendering and loss masks of conversations: rows a second by their number of turns, against rendering every prefix.

    python scripts/bench_data.py [--data DIR] [--rows 20] [--rounds 5]

DIR is the folder of real data that the tests use (default: POSTTRAIN_TEST_DATA, or ../shared/data). Conversations are
real tool-calling ones joined to the wanted number of assistant turns, with the real Qwen tokenizer. Three ways to the
same mask, each one row at a time and all in one process and one run, so the ratios are what counts:

    traced      posttrain.data.render_chat: two renderings and one tokenization, whatever the number of turns
    prefixes    a turn is what `apply_chat_template(tokenize=True)` gives more for the conversation up to it
    as text     the same with prefixes rendered as text, and the whole tokenized once
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from posttrain.data.chat import ChatRenderer, RenderedChat
from posttrain.data.messages import normalize_messages, normalize_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = tuple[list[dict[str, Any]], list[dict[str, Any]] | None]
"""Messages and tools."""
Way = Callable[[Row], RenderedChat]

TURNS = (4, 8, 12, 16, 20, 40)
TEMPLATES = ("qwen2_5", "qwen3_instruct_2507", "qwen3_instruct_2507_training")
HERE = Path(__file__).resolve().parent.parent


def load_tokenizer(source: Path) -> PreTrainedTokenizerBase:
    """The Qwen tokenizer from vocab, merges and config that lie in one folder under other names."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        for name in ("vocab.json", "merges.txt"):
            shutil.copy(source / name, folder)
        shutil.copy(source / "qwen3_tokenizer_config.json", Path(folder) / "tokenizer_config.json")
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        return tokenizer


def conversations(source: Path, turns: int, rows: int) -> list[Row]:
    """Real conversations, one after another until there are ``turns`` assistant turns."""
    raw = json.loads((source / "glaive_toolcall_en_demo.json").read_text())
    real = cycle([(normalize_messages(row["conversations"]), normalize_tools(row["tools"])) for row in raw])
    made = []
    for _ in range(rows):
        messages: list[dict[str, Any]] = []
        tools = None
        written = 0
        while written < turns:
            more, offered = next(real)
            tools = tools or offered
            for message in more:
                if written < turns:
                    messages.append(message)
                    written += message["role"] == "assistant"
        made.append((messages, tools))
    return made


# ---------------------------------------------------------------------- rendering and masks


def traced(tokenizer: PreTrainedTokenizerBase) -> Way:
    renderer = ChatRenderer(tokenizer)
    return lambda row: renderer.render([row])[0]


def prefixes(tokenizer: PreTrainedTokenizerBase) -> Way:
    def ids(messages: list[dict[str, Any]], tools: Any, prompt: bool = False) -> list[int]:
        found: Any = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=True, add_generation_prompt=prompt, return_dict=False
        )
        return list(found)

    def render(row: Row) -> RenderedChat:
        messages, tools = row
        whole = ids(messages, tools)
        mask = [False] * len(whole)
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                start, stop = len(ids(messages[:i], tools, True)), len(ids(messages[: i + 1], tools))
                mask[start:stop] = [True] * (stop - start)
        return RenderedChat(whole, mask)

    return render


def prefixes_as_text(tokenizer: PreTrainedTokenizerBase) -> Way:
    def text(messages: list[dict[str, Any]], tools: Any, prompt: bool = False) -> str:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt))

    def render(row: Row) -> RenderedChat:
        messages, tools = row
        encoded = tokenizer(text(messages, tools), add_special_tokens=False, return_offsets_mapping=True)
        turns = [
            (len(text(messages[:i], tools, True)), len(text(messages[: i + 1], tools)))
            for i, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        mask = [any(start <= first < stop for start, stop in turns) for first, _ in encoded["offset_mapping"]]
        return RenderedChat(encoded["input_ids"], mask)

    return render


def check(tokenizer: PreTrainedTokenizerBase, row: Row, turns: int) -> None:
    """All ways give the same ids; prefixes also mask the line break after each end of turn, which nobody samples."""
    ours, *others = (way(tokenizer)(row) for way in (traced, prefixes, prefixes_as_text))
    line_break = tokenizer("\n")["input_ids"]
    for other in others:
        more = [i for i, (a, b) in enumerate(zip(ours.mask, other.mask, strict=True)) if a != b]
        if ours.ids != other.ids or [ours.ids[i] for i in more] != line_break * turns:
            raise SystemExit("the ways do not agree on ids and masks")


def seconds(way: Way, rows: Sequence[Row]) -> float:
    started = time.perf_counter()
    for row in rows:
        way(row)
    return time.perf_counter() - started


def chat(data: Path, count: int, rounds: int, console: Console) -> None:
    """One table a template: rows a second of each way, the ratios, and what a turn costs."""
    tokenizer = load_tokenizer(data / "tokenizer")
    for template in TEMPLATES:
        tokenizer.chat_template = (data / "tokenizer" / "templates" / f"{template}.jinja").read_text()
        ways = [traced(tokenizer), prefixes(tokenizer), prefixes_as_text(tokenizer)]
        table = Table(title=f"{template}: rows/s, {rounds} rounds of {count} rows, medians")
        for column in (
            "turns",
            "tokens",
            "traced",
            "prefixes",
            "as text",
            "x prefixes",
            "x as text",
            "traced, us/token",
        ):
            table.add_column(column, justify="right")
        for turns in TURNS:
            rows = conversations(data / "tools", turns, count)
            check(tokenizer, rows[0], turns)
            tokens = sum(len(ways[0](row).ids) for row in rows) / count
            times = [[seconds(way, rows) / count for way in ways] for _ in range(rounds)]
            rates = [1 / statistics.median(column) for column in zip(*times, strict=True)]
            ratios = [statistics.median(t[k] / t[0] for t in times) for k in (1, 2)]
            cost = statistics.median(t[0] for t in times) / tokens * 1e6
            figures = [f"{rate:,.1f}" for rate in rates] + [f"{ratio:.1f}" for ratio in ratios] + [f"{cost:.2f}"]
            table.add_row(str(turns), f"{tokens:,.0f}", *figures)
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("POSTTRAIN_TEST_DATA") or HERE.parent / "shared" / "data"
    parser.add_argument("--data", type=Path, default=Path(default), help="folder with tokenizer/ and tools/")
    parser.add_argument("--rows", type=int, default=20, help="conversations of each length")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each way")
    args = parser.parse_args()
    chat(args.data, args.rows, args.rounds, Console(width=120))


if __name__ == "__main__":
    main()
