"""Answers to an agent's requests: sampled from the engine of its episode, within the limits of the run."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from posttrain.config import RolloutConfig
from posttrain.core.types import Sample, Sampling
from posttrain.envs.session import Asked, TokenSession
from posttrain.envs.wire import Answers, Choice, Finish, Refused, Request

if TYPE_CHECKING:
    from posttrain.engines.base import Generator


class AgentSession:
    """The requests of one episode.

    Args:
        cfg: limits of turns and tokens.
        sampling: of the run. What clients ask for (temperature and the like) is not used: the trainer needs the
            log-probabilities of the distribution that was sampled from.
    """

    def __init__(self, session: TokenSession, sampler: Generator, cfg: RolloutConfig, sampling: Sampling) -> None:
        self.session, self.sampler, self.cfg, self.sampling = session, sampler, cfg, sampling
        self.reward: float | None = None
        """That the agent has posted."""
        self.failure: str | None = None
        """Why the episode fails, whatever the agent still does."""
        self.failed = asyncio.Event()
        self.exhausted: Literal["max_turns", "length"] | None = None
        """The limit at which a request was refused."""
        self.closed = False
        self._begun = 0
        self._working: set[asyncio.Task[None]] = set()

    def fail(self, reason: str) -> None:
        """End the episode with a reason; the first one counts."""
        self.failure = self.failure or reason
        self.failed.set()

    def close(self) -> None:
        """End the session and its requests."""
        self.closed = True
        for task in self._working:
            task.cancel()

    @contextmanager
    def working(self, most: int) -> Iterator[None]:
        """Count the current task among the session's requests. Raises ``Refused`` where there are too many."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._working) >= most:
            raise Refused(429, f"more than {most} requests at once", code="rate_limit_error", fatal=True)
        self._working.add(task)
        try:
            yield
        finally:
            self._working.discard(task)

    async def answer(self, request: Request) -> Answers:
        """Sample the answers to a request.

        Raises:
            Refused: the episode has no turns or tokens left.
            DataError: the messages cannot be shown to the model.
            PosttrainError: the engine fails.
        """
        asked = self.session.asked(request.messages, request.tools)
        left = self._tokens_left(asked)
        most = left if request.max_tokens is None else min(left, request.max_tokens)
        if self._begun + request.n > self.cfg.max_turns:
            if self._begun:
                self.exhausted = "max_turns"
            raise Refused(400, f"the episode has had its {self.cfg.max_turns} turns (rollout.max_turns)")
        self._begun += request.n
        tasks = [asyncio.create_task(self._sample(asked, most)) for _ in range(request.n)]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        if request.logprobs and any(math.isnan(p) for samples in found for sample in samples for p in sample.logprobs):
            raise Refused(400, "logprobs: the server that samples (generate.endpoint.url) gives none")
        return Answers([self._answer(asked, request, samples) for samples in found], asked.ids.tolist())

    def _tokens_left(self, asked: Asked) -> int:
        """Return how many tokens may follow: as in an ordinary episode, with the branch's first prompt as the prompt.
        Raises ``Refused``."""
        cfg, given = self.cfg, len(asked.ids)
        start = given if asked.parent is None else asked.parent.branch.prompt_length
        left = min(cfg.max_response_tokens - (given - start), cfg.max_prompt_tokens + cfg.max_response_tokens - given)
        if left > 0 and (asked.parent is not None or given <= cfg.max_prompt_tokens):
            return left
        if self.session.turns:
            self.exhausted = "length"
        raise Refused(
            400,
            f"the conversation has {given} tokens, of which {start} are its prompt: rollout.max_prompt_tokens = "
            f"{cfg.max_prompt_tokens}, rollout.max_response_tokens = {cfg.max_response_tokens}",
            code="context_length_exceeded",
        )

    async def _sample(self, asked: Asked, most: int) -> list[Sample]:
        """Sample a turn, in several parts where weight updates cut it off."""
        samples: list[Sample] = []
        ids: Sequence[int] = asked.ids.tolist()
        while True:
            sample = await self.sampler.generate(ids, self.sampling.params(most))
            samples.append(sample)
            ids, most = [*ids, *sample.ids], most - len(sample.ids)
            if sample.finish_reason != "abort" or most <= 0:
                return samples

    def _answer(self, asked: Asked, request: Request, samples: list[Sample]) -> Choice:
        renderer = self.session.renderer
        ids = [i for sample in samples for i in sample.ids]
        text, stopped_by = renderer.text(ids), None
        if (found := _first(text, request.stop)) is not None:
            place, stopped_by = found
            samples = _cut(samples, _tokens_until(ids, text[: place + len(stopped_by)], renderer.text), len(asked.ids))
            ids, text = [i for sample in samples for i in sample.ids], text[:place]
        message = self.session.sampled(asked, samples, text)
        finish: Finish = "tool_calls" if message.get("tool_calls") else "stop"
        if samples[-1].finish_reason != "stop" and stopped_by is None:
            finish = "length"
        return Choice(
            message,
            finish,
            ids,
            [p for sample in samples for p in sample.logprobs],
            [renderer.word(i) for i in ids] if request.logprobs else [],
            stopped_by,
        )


def _first(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Return the first of the stop texts that is found, and where."""
    found = [(text.find(stop), stop) for stop in stops if stop and stop in text]
    return min(found, default=None)


def _tokens_until(ids: Sequence[int], wanted: str, text_of: Callable[[Sequence[int]], str]) -> int:
    """Return the fewest first tokens whose text begins with ``wanted``. Its length says less: where a character has
    several tokens, the first of them may read as several characters."""
    return bisect_left(range(len(ids)), True, key=lambda count: text_of(ids[:count]).startswith(wanted))


def _cut(samples: Sequence[Sample], count: int, read: int) -> list[Sample]:
    """Return the samples of a request up to ``count`` tokens, without the experts of tokens after these.

    Args:
        read: tokens of the request.
    """
    kept: list[Sample] = []
    for sample in samples:
        ids = sample.ids[:count]
        count, read = count - len(ids), read + len(ids)
        routing = None if sample.routing is None else sample.routing[:read]
        kept.append(replace(sample, ids=ids, logprobs=sample.logprobs[: len(ids)], routing=routing))
    return [sample for sample in kept if sample.ids]
