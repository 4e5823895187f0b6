"""An HTTP endpoint that takes JSON: a deadline for each request, retries, and a limit on requests at once."""

from __future__ import annotations

import asyncio
import math
import os
import random
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from posttrain.core.errors import ConfigError

_BACKOFF_S = 0.5
"""Wait before the first retry; each later one waits twice as long, up to ``_LONGEST_BACKOFF_S``, less up to a half."""
_LONGEST_BACKOFF_S = 30.0
_LONGEST_RETRY_AFTER_S = 120.0
"""An endpoint that asks for a longer pause is taken for unavailable: a run must not stand still without a word."""
_EXCERPT = 200
"""Characters of somebody else's text that an error shows."""


class Unanswered(Exception):
    """A request brought no answer, or none that can be read. The message names the endpoint and why."""


class Endpoint:
    """POSTs JSON to ``url``. It belongs to one event loop, but may be made before that runs; ``close()`` it there.

    Args:
        deadline_s: longest wait for one answer.
        retries: after a refused connection, a timeout, HTTP 408, 429 or 5xx: exponential backoff, and `Retry-After` is
            respected.
        concurrency: most requests at once. Who waits between two attempts counts, so that an endpoint in trouble gets
            fewer requests and not other ones.
        key: sent as a bearer token, and shown in no error.
    """

    def __init__(self, url: httpx.URL, *, deadline_s: float, retries: int, concurrency: int, key: str = "") -> None:
        self.url = url
        self.where = f"{url.scheme}://{url.netloc.decode()}{url.path}"
        """The URL without its query, for messages."""
        self._deadline_s, self._retries, self._key = deadline_s, retries, key
        # No limits of the client's own: its timeouts are between bytes, where `deadline_s` is of a whole attempt, and
        # its queue for a connection would count as waiting for an answer.
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(headers=headers, timeout=None, limits=httpx.Limits())
        self._slots = asyncio.Semaphore(concurrency)
        self._jitter = random.Random()  # the global one is seeded, and must not depend on an endpoint's health

    async def post(self, body: Any) -> httpx.Response:
        """The endpoint's answer to ``body``. Raises ``Unanswered`` after the last attempt."""
        attempts, attempt = self._retries + 1, 1
        async with self._slots:
            while True:
                try:
                    return await self._attempt(body)
                except _Failed as failure:
                    if not failure.retry or attempt == attempts:
                        after = f" (attempt {attempt} of {attempts})" if attempt > 1 else ""
                        raise Unanswered(f"{self.where}: {failure}{after}") from failure
                    backoff = min(_LONGEST_BACKOFF_S, _BACKOFF_S * 2.0 ** (attempt - 1))
                    pause = failure.retry_after_s + backoff * self._jitter.uniform(0.5, 1.0)
                await asyncio.sleep(pause)
                attempt += 1

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def excerpt(self, text: str) -> str:
        """The beginning of foreign text, in one line."""
        return self.line(text)[:_EXCERPT]

    def end(self, text: str) -> str:
        """The end of foreign text, in one line."""
        return self.line(text)[-_EXCERPT:]

    def line(self, text: str) -> str:
        """Foreign text in one line. The key goes before anything is cut, so that no part of it stays."""
        return " ".join((text.replace(self._key, "***") if self._key else text).split())

    async def _attempt(self, body: Any) -> httpx.Response:
        try:
            async with asyncio.timeout(self._deadline_s):
                response = await self._client.post(self.url, json=body)
        except TimeoutError as error:
            raise _Failed(f"no answer within {self._deadline_s:g} s", retry=True) from error
        except httpx.RequestError as error:  # also an answer that is no gzip, as its header says it is
            raise _Failed(self.excerpt(f"{type(error).__name__}: {error}"), retry=True) from error
        if not response.is_success:
            raise self._refusal(response)
        return response

    def _refusal(self, response: httpx.Response) -> _Failed:
        status = response.status_code
        message = f"HTTP {status}: {self.excerpt(response.text)}"
        pause = _retry_after(response.headers.get("Retry-After"))
        if pause > _LONGEST_RETRY_AFTER_S:
            return _Failed(f"{message} (it asks for a pause of {pause:.0f} s)")
        return _Failed(message, retry=status in (408, 429) or status >= 500, retry_after_s=pause)


class _Failed(Exception):
    """One attempt brought no answer."""

    def __init__(self, message: str, *, retry: bool = False, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry = retry
        self.retry_after_s = retry_after_s


def http_url(url: str, *, what: str, example: str) -> httpx.URL:
    """A checked URL of scheme http or https. ``what`` is the config key, for messages, beside which `api_key_env` lies.

    Raises:
        ConfigError: it is none, or holds a user or password.
    """
    hint = f"for example {example}"
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{what} is not a URL: {error}", hint=hint) from error
    if parsed.userinfo:
        key = what.removesuffix("url") + "api_key_env"
        raise ConfigError(f"{what} holds a user or password", hint=f"use {key}")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"{what} = {url!r} is not an http or https URL", hint=hint)
    return parsed


def api_key(variable: str, *, what: str) -> str:
    """The key in an environment variable; empty where ``variable`` is. ``what`` is the config key, for messages.

    Raises:
        ConfigError: the variable is not set, or holds what no HTTP header may.
    """
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"{what}: ${variable} is not set", hint=f"export {variable}=...")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(
            f"{what}: ${variable} holds characters that no HTTP header may", hint=f"export {variable}=... without them"
        )
    return key


def _retry_after(value: str | None) -> float:
    """Seconds of a ``Retry-After`` header (seconds or a date, RFC 9110 section 10.2.3); 0 for none."""
    if value is None:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = parsedate_to_datetime(value)
        except ValueError:
            return 0.0
        seconds = (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0
