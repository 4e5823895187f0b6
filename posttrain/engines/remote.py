"""A generator behind an OpenAI-compatible server: token ids in, token ids out."""

from __future__ import annotations

import asyncio
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np

from posttrain.config import ServerConfig
from posttrain.core.errors import ConfigError, RunError
from posttrain.core.http import Endpoint, Unanswered, api_key, http_url
from posttrain.core.types import FinishReason, Ids, Sample, SamplingParams
from posttrain.data.chat import end_of_turn
from posttrain.data.images import PlacedImage, given_to_none

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEY = "generate.endpoint"


class RemoteGenerator:
    """A ``Generator`` that calls the server's `/completions`, the only call of the protocol that takes token ids.

    vLLM and SGLang return the sampled ids. The text of any other server is tokenized: the ids may then differ from
    those that were sampled, but give the same text.

    Args:
        stop_token_ids: end a turn; the chat template's is appended where the server does not say at which it stopped.
    """

    def __init__(self, cfg: ServerConfig, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int]) -> None:
        self.cfg, self._tokenizer, self._stops = cfg, tokenizer, list(stop_token_ids)
        self._end = end_of_turn(tokenizer)
        self._last = max(tokenizer.get_vocab().values())
        self._base = http_url(cfg.url, what=f"{_KEY}.url", example="http://127.0.0.1:8000/v1")
        self._secret = api_key(cfg.api_key_env, what=f"{_KEY}.api_key_env")
        self._endpoint = Endpoint(
            self._at("completions"),
            deadline_s=cfg.deadline_s,
            retries=cfg.retries,
            concurrency=cfg.concurrency,
            key=self._secret,
        )
        self.model = cfg.model

    def _at(self, name: str) -> httpx.URL:
        return self._base.copy_with(path=f"{self._base.path.rstrip('/')}/{name}")

    async def open(self) -> None:
        """Ask the server which models it serves.

        Raises:
            ConfigError: the server does not answer, or does not serve the model.
        """
        headers = {"Authorization": f"Bearer {self._secret}"} if self._secret else {}
        try:
            async with httpx.AsyncClient(headers=headers, timeout=self.cfg.deadline_s) as client:
                answer = await client.get(self._at("models"))
            answer.raise_for_status()
            served = [str(entry["id"]) for entry in answer.json()["data"]]
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{_KEY}.url = {self.cfg.url!r}: {self._at('models').path} gives no list of models: "
                f"{self._endpoint.excerpt(f'{type(error).__name__}: {error}')}",
                hint="is an OpenAI-compatible server there, and does it want a key (generate.endpoint.api_key_env)?",
            ) from error
        if not self.model and len(served) == 1:
            self.model = served[0]
        if self.model not in served:
            raise ConfigError(
                f"{_KEY}.model = {self.model!r} is not served at {self.cfg.url}",
                hint=f"--set {_KEY}.model=NAME, one of: {', '.join(sorted(served)[:10])}",
            )

    async def generate(self, prompt_ids: Ids, params: SamplingParams, images: Sequence[PlacedImage] = ()) -> Sample:
        given_to_none(images, "the server")
        body = {
            "model": self.model,
            "prompt": np.asarray(prompt_ids).tolist(),
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            # Extensions of vLLM and SGLang.
            "stop_token_ids": self._stops,
            "skip_special_tokens": False,
            "return_token_ids": True,
        }
        if params.top_k:
            body["top_k"] = params.top_k
        if params.seed is not None:
            body["seed"] = params.seed
        try:
            response = await self._endpoint.post(body)
            [choice] = response.json()["choices"]
            return self._sample(choice)
        except Unanswered as error:
            raise RunError(str(error)) from error
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            excerpt = self._endpoint.excerpt(response.text)
            raise RunError(f"{self._endpoint.where}: not a completion: {excerpt}") from error

    def _sample(self, choice: dict[str, Any]) -> Sample:
        told = choice["finish_reason"]
        if told not in ("stop", "length"):  # "abort" or "content_filter": what it has given is no whole answer
            raise RunError(f"{self._endpoint.where} ended a request with finish_reason = {told!r}")
        reason: FinishReason = told
        ids = choice.get("token_ids")
        if ids is None:
            ids = self._tokenizer(choice["text"], add_special_tokens=False)["input_ids"]
        ids = [operator.index(i) for i in ids]
        if unknown := next((i for i in ids if not 0 <= i <= self._last), None):
            raise RunError(
                f"{self._endpoint.where} gave token {unknown}, and the last one of the tokenizer of model.path is "
                f"{self._last}: is model.path the model that is served?"
            )
        if reason == "stop" and (not ids or ids[-1] not in self._stops):
            token = choice.get("stop_reason")
            ids.append(token if token in self._stops else self._end)
        return Sample(ids, [math.nan] * len(ids), reason, 0)

    async def score(self, sequences: Sequence[Ids]) -> list[list[float]]:
        raise RunError("the log-probabilities of a server's model are not asked for")

    async def close(self) -> None:
        await self._endpoint.close()


async def open_server(
    cfg: ServerConfig, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int]
) -> RemoteGenerator:
    """Return a generator whose server has answered. Raises ``ConfigError``."""
    sampler = RemoteGenerator(cfg, tokenizer, stop_token_ids)
    try:
        await sampler.open()
    except BaseException:
        await asyncio.shield(sampler.close())
        raise
    return sampler
