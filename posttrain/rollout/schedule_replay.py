"""The schedule of a recorded run, read back, and what makes another run take the same turns."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.errors import ConfigError, DataError, DeadlineError, RunError
from posttrain.rollout.schedule import FILE, FORMAT, Schedule, played

if TYPE_CHECKING:
    from posttrain.core.types import Ids, Sample, SamplingParams, Trajectory
    from posttrain.data.images import PlacedImage
    from posttrain.engines.base import Generator

_DIFFERENT = "the model, a tool, a grader or a package is another than when it was recorded, or answers by chance"


@dataclass(frozen=True)
class Recorded:
    """The schedule of a recorded run."""

    name: str
    """Name of its folder"""
    header: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]

    @staticmethod
    def read(folder: Path) -> Recorded:
        """Read the schedule of the run in ``folder``.

        Raises:
            ConfigError: there is no such run, or it has no schedule.
            DataError: the file is damaged.
        """
        path = folder / FILE
        if not folder.is_dir():
            raise ConfigError(f"rollout.replay_schedule: there is no run {folder}", hint="give its name, or its folder")
        if not path.is_file():
            raise ConfigError(
                f"rollout.replay_schedule: {folder} has no {FILE}",
                hint="only a run with rollout.record_schedule = true can be repeated",
            )
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # a killed run may have left half of a line
        try:
            first, *events = [_object(line, number) for number, line in enumerate(lines, start=1)]
            if first["schedule"] != FORMAT:
                raise ValueError(f"format {first['schedule']}, and this version reads {FORMAT}")
            found = Recorded(folder.name, first, events)
            Replay(found, 0, Schedule(), 0.0)
            for episode in itertools.chain.from_iterable(event.get("episodes", ()) for event in events):
                _ = episode["tokens"], episode["reward"], episode["error"]
        except (ValueError, TypeError, KeyError, IndexError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else error
            raise DataError(f"{path}: not a schedule: {what}", hint="put the file of the run back") from None
        return found

    @property
    def steps(self) -> int:
        """Return how many steps it holds."""
        return sum("trained" in event for event in self.events)

    def check(self, header: Mapping[str, Any], may_differ: frozenset[str]) -> None:
        """Check that a run with ``header`` can repeat it.

        Args:
            may_differ: keys of the config in which it may be another.

        Raises:
            ConfigError: it has another config or other prompts.
        """
        old, new = self.header["config"], json.loads(json.dumps(header["config"]))
        keys = [key for key in dict.fromkeys([*old, *new]) if key not in may_differ and old.get(key) != new.get(key)]
        if keys:
            shown = "\n".join(f"  {key}: {old.get(key, 'none')!r} -> {new.get(key, 'none')!r}" for key in keys[:5])
            raise ConfigError(
                f"rollout.replay_schedule: {self.name} was recorded with another config:\n{shown}",
                hint="give the config of that run: --preset RUN/config.toml",
            )
        if self.header["prompts"] != header["prompts"]:
            raise ConfigError(
                f"rollout.replay_schedule: {self.name} was recorded with other prompts than those of data.train",
                hint="put the data file of that run back",
            )


def _object(line: str, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        raise ValueError(f"line {number} is not JSON") from None
    if not isinstance(found, dict):
        raise ValueError(f"line {number} is not an object")
    return found


class Replay(Schedule):
    """Makes a run take the turns of a recorded one.

    Args:
        recorded: the schedule of that run.
        seed: of the run.
        log: takes what happens in this run.
        deadline_s: longest wait of an update for what older weights are to sample, and longest wait of a group for its
            turn in which nothing is sampled.
    """

    repeats = True

    def __init__(self, recorded: Recorded, seed: int, log: Schedule, deadline_s: float) -> None:
        self.name, self.seed, self._log, self._deadline_s = recorded.name, seed, log, deadline_s
        events = recorded.events
        self._turns = [event for event in events if "ended" in event or "trained" in event]
        self._rows = {event["drawn"]: event["row"] for event in events if "drawn" in event}
        self._ends: dict[int, list[_Parts]] = {
            event["ended"]: [_Parts.of(episode["versions"]) for episode in event["episodes"]]
            for event in events
            if "ended" in event
        }
        self._version = -1
        self._training = False
        """Trainers work on a step."""
        self._place = 0
        """Turns that were taken."""
        self._left: Counter[int] = Counter()
        """Tokens that a version of the weights is to sample still."""
        self._failure: RunError | None = None
        self._news = asyncio.Event()
        self._changes = 0
        """How often there was news."""

    # ------------------------------------------------------------------ groups

    def drawn(self, number: int, row: int) -> None:
        if self._rows.get(number, row) != row:
            raise self.fail(f"draw {number} is row {row}, and was row {self._rows[number]}")
        self._log.drawn(number, row)
        self._tell()

    def sampler(self, number: int, episode: int, sampler: Generator) -> Generator:
        parts = self._ends.get(number)
        return _Repeating(self, sampler, None if parts is None else parts[episode], f"draw {number}, episode {episode}")

    async def ended(self, number: int, episodes: Sequence[Trajectory]) -> None:
        """Return when it is the group's turn to end.

        Raises:
            DeadlineError: the group whose turn it is does not end, and nothing is sampled any more.
            RunError: it is not what was recorded.
        """
        while not (self._place < len(self._turns) and self._turns[self._place].get("ended") == number):
            before = self._changes
            try:
                async with asyncio.timeout(self._deadline_s):
                    await self._change()
            except TimeoutError:
                other = self._late() if before == self._changes else None
                if other is not None and number in self._ends:
                    what = (
                        f"{self._of(number)} has been played, and waited {self._deadline_s:g} s for its turn, in which "
                        f"nothing was sampled: in the recorded run {self._of(other)} ended before it"
                    )
                    hint = f"{_DIFFERENT}, or takes longer; then raise rollout.episode_deadline_s"
                    raise self._fail(DeadlineError(f"replay of {self.name}: {what}", hint=hint)) from None
        for i, (episode, wanted) in enumerate(zip(episodes, self._turns[self._place]["episodes"], strict=True)):
            got = played(episode)
            for what, key in (("error", "error"), ("tokens", "tokens"), ("reward", "reward"), ("weights", "versions")):
                if got[key] != wanted[key]:
                    where = f"row {episode.prompt.index}, episode {i}"
                    raise self.fail(f"{where}: other {what} than recorded: {got[key]!r} instead of {wanted[key]!r}")
        await self._log.ended(number, episodes)
        self._next()

    def batch(self, ready: Sequence[int] | None) -> Sequence[int] | None:
        if self._place == len(self._turns):
            raise RunError(
                f"the schedule of {self.name} ends here, before its last step",
                hint="that run was stopped there; metrics and rollout files have what was repeated until then",
            )
        found: Sequence[int] | None = self._turns[self._place].get("trained")
        return found

    def trained(self, numbers: Sequence[int]) -> None:
        wanted = self._turns[self._place]["trained"]
        if list(numbers) != wanted:
            raise self.fail(f"step {self._version + 1}: draws {list(numbers)} are trained instead of {wanted}")
        self._log.trained(numbers)
        self._training = True
        self._next()

    # ------------------------------------------------------------------ weights

    async def before_update(self, version: int) -> None:
        """Return when older weights have sampled all that they sampled in the recorded run.

        Raises:
            DeadlineError: that took too long.
            RunError: something else was sampled.
        """
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._until(lambda: not any(count for v, count in self._left.items() if v < version))
        except TimeoutError:
            left = sum(count for v, count in self._left.items() if v < version)
            raise DeadlineError(
                f"replay of {self.name}: {left} tokens were not sampled within {self._deadline_s:g} s, and weights "
                f"{version} wait for them",
                hint=f"{_DIFFERENT}; or raise rollout.episode_deadline_s",
            ) from None

    def updated(self, version: int) -> None:
        self._version, self._training = version, False
        self._log.updated(version)
        self._tell()

    async def sampled_by(self, version: int) -> None:
        """Wait until engines have the weights of ``version``."""
        await self._until(lambda: self._version >= version)

    def take(self, version: int, tokens: int) -> None:
        """Count tokens that a version of the weights has sampled."""
        self._left[version] -= tokens
        self._tell()

    # ------------------------------------------------------------------ position

    def resume(self, state: Any) -> None:
        """Begin. Raises ``ConfigError`` amid a replay: episodes that begin anew would want weights that are gone."""
        if state is not None:
            raise ConfigError(
                "rollout.replay_schedule: a replay begins at the first step, and this run has a checkpoint",
                hint="--overwrite, or another --name",
            )
        self._log.resume(None)
        for parts in itertools.chain.from_iterable(self._ends.values()):
            self._left.update(parts.tokens)

    def state(self) -> Any:
        return self._log.state()

    def _next(self) -> None:
        self._place += 1
        self._tell()

    def _tell(self) -> None:
        self._changes += 1
        self._news.set()

    def _late(self) -> int | None:
        """Return the draw whose group is to end next; None: the next turn is the loop's, or trainers work, and what is
        to be sampled may need their weights. Their calls have deadlines of their own."""
        if self._training or self._place == len(self._turns):
            return None
        found: int | None = self._turns[self._place].get("ended")
        return found

    def _of(self, number: int) -> str:
        row = self._rows.get(number)
        return f"draw {number}" if row is None else f"draw {number} (row {row})"

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            await self._change()

    async def _change(self) -> None:
        """Return when a group was drawn, something was sampled, or a turn was taken. Raises what the run failed of."""
        if self._failure is None:
            self._news.clear()
            await self._news.wait()
        if self._failure is not None:
            raise self._failure

    def fail(self, what: str) -> RunError:
        """Return the error of a run that does something else, which ends all that waits for a turn."""
        return self._fail(RunError(f"replay of {self.name}: {what}", hint=_DIFFERENT))

    def _fail(self, error: RunError) -> RunError:
        self._failure = self._failure or error
        self._tell()
        return self._failure


@dataclass(frozen=True)
class _Parts:
    """The parts of an episode that one version of the weights sampled."""

    ends: tuple[tuple[int, int], ...]
    """(version, place of the last token + 1) of each part, in order."""

    @staticmethod
    def of(versions: Sequence[Sequence[int]]) -> _Parts:
        ends = itertools.accumulate(int(count) for _, count in versions)
        return _Parts(tuple((int(version), end) for (version, _), end in zip(versions, ends, strict=True)))

    @property
    def tokens(self) -> Counter[int]:
        """Return version -> tokens that it sampled."""
        found: Counter[int] = Counter()
        for (version, end), (_, begin) in zip(self.ends, [(-1, 0), *self.ends], strict=False):
            if version >= 0:
                found[version] += end - begin
        return found

    def at(self, place: int) -> tuple[int, int, bool] | None:
        """Return (version, tokens, whether an update cut it off) of what is sampled from a place on; None: nothing."""
        for i, (version, end) in enumerate(self.ends):
            if place < end:
                cut = i + 1 < len(self.ends) and self.ends[i + 1][0] >= 0
                return (version, end - place, cut) if version >= 0 else None
        return None


class _Repeating:
    """Samples what was recorded: as many tokens, by the same version of the weights."""

    def __init__(self, replay: Replay, sampler: Generator, parts: _Parts | None, name: str) -> None:
        self._replay, self._sampler, self._parts, self._name = replay, sampler, parts, name

    async def generate(self, prompt_ids: Ids, params: SamplingParams, images: Sequence[PlacedImage] = ()) -> Sample:
        if self._parts is None:  # the recorded run ended before this group
            await asyncio.Event().wait()
        assert self._parts is not None
        found = self._parts.at(len(prompt_ids))
        if found is None:
            raise self._replay.fail(f"{self._name} goes on after {len(prompt_ids)} tokens, and did not")
        version, count, cut = found
        await self._replay.sampled_by(version)
        params = replace(params, max_new_tokens=min(count, params.max_new_tokens))
        sample = await self._sampler.generate(prompt_ids, params, images)
        if sample.version != version or len(sample.ids) != count:
            got = f"{len(sample.ids)} tokens of version {sample.version}"
            raise self._replay.fail(f"{self._name}: {got} instead of {count} of version {version}")
        self._replay.take(version, count)
        return replace(sample, finish_reason="abort") if cut and sample.finish_reason == "length" else sample
