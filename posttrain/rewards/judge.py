"""A judge: a model behind an OpenAI-compatible endpoint that reads a conversation and answers with a number.

LLM-as-a-judge, single-answer grading: Zheng et al. 2023, arXiv:2306.05685.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import sqlite3
import string
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from posttrain.config import JudgeConfig
from posttrain.core.errors import ConfigError, RunError
from posttrain.core.http import Endpoint, Unanswered, api_key, http_url
from posttrain.core.text import encodable
from posttrain.core.types import Message, Score, Trajectory
from posttrain.rewards import failed

_PLACEHOLDERS = ("conversation", "response", "question", "ground_truth")

_LOCK_S = 30.0
"""Longest wait for another process that writes to the same cache."""


def check_judge(cfg: JudgeConfig) -> None:
    """Check that a judge can be made of this config; the endpoint is not asked.

    Raises:
        ConfigError: the URL, model, key, prompt or pattern cannot work.
    """
    _url(cfg)
    if not cfg.model:
        raise ConfigError("reward.judge.model is empty", hint="give the model's name at the endpoint")
    _pattern(cfg.pattern)
    _check_template(cfg.prompt)
    _key(cfg)


class Judge:
    """An ``EpisodeScorer`` (part ``judge``). It belongs to one event loop; ``close()`` it there.

    ``cache`` is the sqlite file that keeps answers; None keeps them in memory. `reward.judge.cache = false` keeps none,
    and asks for every episode anew. Scores are ``number / scale``; ``Score.extracted`` is the number as it was written.

    Raises:
        ConfigError: the URL, model, key, prompt or pattern cannot work.
        RunError: the cache file cannot be opened.
    """

    name = "judge"

    def __init__(self, cfg: JudgeConfig, cache: Path | None) -> None:
        check_judge(cfg)
        self.cfg = cfg
        self._pattern = _pattern(cfg.pattern)
        self._endpoint = Endpoint(
            _url(cfg), deadline_s=cfg.deadline_s, retries=cfg.retries, concurrency=cfg.concurrency, key=_key(cfg)
        )
        self._asking: dict[str, asyncio.Task[_Answer]] = {}
        self._kept = _Kept(cache) if cfg.cache else None

    async def score(self, episodes: Sequence[Trajectory]) -> list[Score]:
        """A score for each episode, in order. Raises ``RunError`` when the cache file cannot be used any more."""
        return list(await asyncio.gather(*(self._score(episode) for episode in episodes)))

    async def close(self) -> None:
        """End requests under way, and close connections and cache."""
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await self._endpoint.close()
        if self._kept is not None:
            await asyncio.to_thread(self._kept.close)

    async def _score(self, episode: Trajectory) -> Score:
        try:
            answer = await self._answer(fill(self.cfg.prompt, episode))
        except Unanswered as failure:
            return failed(str(failure))
        except RunError:
            raise
        except Exception as error:  # whatever is odd about this episode: the others are scored all the same
            return failed(f"the judge could not be asked: {self._endpoint.excerpt(f'{type(error).__name__}: {error}')}")
        return self._verdict(answer)

    async def _answer(self, text: str) -> _Answer:
        """The kept answer, the one that somebody else is waiting for already, or a new one."""
        if self._kept is None:
            return await self._ask(text)
        identity = [self.cfg.model, str(self._endpoint.url), self.cfg.temperature, text]
        key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        if key not in self._asking:
            task = asyncio.create_task(self._recall_or_ask(self._kept, key, text))
            self._asking[key] = task
            task.add_done_callback(lambda done: self._forget(key, done))
        # One who stops waiting leaves the others their answer.
        return await asyncio.shield(self._asking[key])

    def _forget(self, key: str, task: asyncio.Task[_Answer]) -> None:
        del self._asking[key]
        if not task.cancelled():
            task.exception()  # seen, also where all who waited were cancelled

    async def _recall_or_ask(self, kept: _Kept, key: str, text: str) -> _Answer:
        text_kept = await asyncio.to_thread(kept.get, key)
        if text_kept is not None and self._verdict(_Answer(text_kept)).error is None:
            return _Answer(text_kept)
        answer = await self._ask(text)
        if self._verdict(answer).error is None:
            await asyncio.to_thread(kept.put, key, answer.text)
        return answer

    async def _ask(self, text: str) -> _Answer:
        """Raises ``Unanswered``."""
        body = {
            "model": self.cfg.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": self.cfg.temperature,
            "max_tokens": self.cfg.max_tokens,
        }
        return self._content(await self._endpoint.post(body))

    def _content(self, response: httpx.Response) -> _Answer:
        try:
            choice = response.json()["choices"][0]
            content, cut = choice["message"]["content"], choice.get("finish_reason") == "length"
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            excerpt = self._endpoint.excerpt(response.text)
            raise Unanswered(f"{self._endpoint.where}: not a chat completion: {excerpt}") from error
        return _Answer(encodable(content) if isinstance(content, str) else "", cut)

    def _verdict(self, answer: _Answer) -> Score:
        """The last number that the pattern finds, scaled."""
        number = None
        for match in self._pattern.finditer(answer.text):
            number = match.group(1)
        try:
            value = float(number or "") / self.cfg.scale
        except ValueError:
            value = math.nan
        if math.isfinite(value):
            return Score(value, correct=False, extracted=number)
        end = self._endpoint.end(answer.text)
        why = "; it was cut at reward.judge.max_tokens" if answer.cut else ""
        return failed(f"no score (reward.judge.pattern) in the judge's answer, which ends with {end!r}{why}")


class _Answer(NamedTuple):
    text: str
    cut: bool = False
    """it ended at the endpoint's token limit"""


class _Kept:
    """Answers by key, in a sqlite file that several processes may share, or in memory. Any thread may call."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._lock = threading.Lock()
        try:
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                ":memory:" if file is None else file, timeout=_LOCK_S, check_same_thread=False, isolation_level=None
            )
        except (OSError, sqlite3.Error) as error:
            raise self._broken(error) from error
        self._execute("PRAGMA synchronous = NORMAL")
        self._execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL) WITHOUT ROWID")

    def get(self, key: str) -> str | None:
        rows = self._execute("SELECT answer FROM answers WHERE key = ?", key)
        return str(rows[0][0]) if rows else None

    def put(self, key: str, answer: str) -> None:
        self._execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", key, answer)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _execute(self, sql: str, *values: str) -> list[Any]:
        try:
            with self._lock:
                return self._db.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> RunError:
        return RunError(
            f"the judge's cache {self._file or 'in memory'} cannot be used: {error}",
            hint="is its disk full? a damaged file may be deleted; reward.judge.cache = false does without",
        )


# ---------------------------------------------------------------------- what the judge reads


def fill(template: str, episode: Trajectory) -> str:
    """The judge's prompt for one episode. Braces in the episode's own text mean nothing.

    ``{conversation}`` is all of it, see ``conversation_text``; ``{response}`` what the assistant wrote in all turns;
    ``{question}`` the prompt's last user message; ``{ground_truth}`` the row's, as JSON where it is not text.
    """
    questions = [_text(m) for m in episode.prompt.messages if m["role"] == "user"]
    truth = episode.prompt.ground_truth
    return encodable(
        template.format(
            conversation=conversation_text(episode.messages),
            response=episode.response_text,
            question=questions[-1] if questions else "",
            ground_truth=truth if isinstance(truth, str) else "" if truth is None else _json(truth),
        )
    )


def conversation_text(messages: Sequence[Message]) -> str:
    """A conversation as text: each message starts a line with its role, each tool call with the tool's name.

    Further lines are indented. So what stands at the start of a line is never a message's own text, and no message can
    pretend to be two.
    """
    lines = []
    for message in messages:
        role, text, calls = message["role"], _text(message), message.get("tool_calls") or []
        named = f"{role} {message['name']}" if message.get("name") else role
        if text or not calls:
            lines.append(f"{named}: {text}")
        for call in calls:
            function = call["function"]
            lines.append(f"{named} calls {function['name']}: {_json(function['arguments'])}")
    return "\n".join("\n    ".join(line.splitlines()).rstrip() for line in lines)


def _text(message: Message) -> str:
    content: Any = message.get("content")
    return content if isinstance(content, str) else "" if content is None else _json(content)


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# ---------------------------------------------------------------------- checks of the config


def _url(cfg: JudgeConfig) -> httpx.URL:
    base = http_url(cfg.url, what="reward.judge.url", example="http://127.0.0.1:8000/v1")
    return base.copy_with(path=f"{base.path.rstrip('/')}/chat/completions")


def _key(cfg: JudgeConfig) -> str:
    return api_key(cfg.api_key_env, what="reward.judge.api_key_env")


def _pattern(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"reward.judge.pattern is not a regular expression: {error}", hint="for example Score: (\\d+)"
        ) from error
    if not compiled.groups:
        raise ConfigError("reward.judge.pattern has no group", hint="put the number in parentheses: Score: (\\d+)")
    return compiled


def _check_template(template: str) -> None:
    known = ", ".join(f"{{{name}}}" for name in _PLACEHOLDERS)
    hint = f"known: {known}; write {{{{ and }}}} for braces of your own"
    try:
        fields = [field for field in string.Formatter().parse(template) if field[1] is not None]
    except ValueError as error:
        raise ConfigError(f"reward.judge.prompt is not a template: {error}", hint=hint) from error
    for _, name, spec, conversion in fields:
        if name not in _PLACEHOLDERS or spec or conversion:
            field = f"{name}{'!' + conversion if conversion else ''}{':' + spec if spec else ''}"
            raise ConfigError(f"reward.judge.prompt has an unknown placeholder {{{field}}}", hint=hint)
    if not {"conversation", "response"} & {name for _, name, _, _ in fields}:
        raise ConfigError("reward.judge.prompt shows the judge no answer", hint="it needs {conversation} or {response}")
