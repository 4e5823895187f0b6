"""Trajectories to write to rollout files, with all that may be in them."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import strategies as st

from posttrain.core.types import Prompt, Trajectory

VOCABULARY = 1000
TOKENIZER = "fingerprint of a tokenizer"

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text(max_size=20)}
    ),
    max_size=4,
)
_IMAGES = st.lists(
    st.builds(lambda data: {"bytes": data}, st.binary(max_size=9)) | st.just({"path": "a/b.png"}), max_size=3
)
_FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Any trajectory that an episode may leave behind, as far as its types go."""
    length = draw(st.integers(1, 20))
    prompt_length = draw(st.integers(1, length))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    mask = (rng.random(length) < 0.6) & (np.arange(length) >= prompt_length)
    prompt = Prompt(
        index=draw(st.integers(0, 2**31 - 1)),
        messages=draw(_MESSAGES),  # type: ignore[arg-type]
        data_source=draw(st.text(max_size=8)),
        ground_truth=draw(_JSON),
        extra_info=draw(st.dictionaries(st.text(max_size=4), _JSON, max_size=3)),
        images=draw(_IMAGES),
    )
    return Trajectory(
        prompt=prompt,
        tokens=rng.integers(0, VOCABULARY, length, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -rng.exponential(1.0, length), 0.0).astype(np.float32),
        weight_version=np.where(mask, draw(st.integers(0, 9)), -1).astype(np.int32),
        messages=prompt.messages + draw(_MESSAGES),  # type: ignore[operator]
        stop_reason=draw(st.sampled_from(["stop", "length", "max_turns", "prompt_too_long", "deadline", "error"])),
        turns=draw(st.integers(0, 9)),
        tool_calls=draw(st.integers(0, 9)),
        seconds=draw(st.floats(0, 1e6)),
        prompt_length=prompt_length,
        reward=draw(_FLOATS),
        reward_parts=draw(st.dictionaries(st.text(max_size=6), _FLOATS, max_size=3)),
        correct=draw(st.booleans()),
        error=draw(st.none() | st.text(max_size=8)),
        tool_images=draw(_IMAGES),  # type: ignore[arg-type]
    )


def trajectory(index: int = 0, reward: float = 1.0, length: int = 6, **changes: object) -> Trajectory:
    """One that is like those of real episodes. ``changes`` are set as they are."""
    messages = [{"role": "user", "content": f"What is {index}?"}]
    made = Trajectory(
        prompt=Prompt(index, messages, "openai/gsm8k", "8", {"index": index}),  # type: ignore[arg-type]
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=np.arange(length) >= 3,
        logprobs=np.where(np.arange(length) >= 3, -0.5, 0.0).astype(np.float32),
        weight_version=np.where(np.arange(length) >= 3, 0, -1).astype(np.int32),
        messages=[*messages, {"role": "assistant", "content": "#### 8"}],  # type: ignore[list-item]
        stop_reason="stop",
        turns=1,
        tool_calls=0,
        seconds=0.25,
        prompt_length=3,
        reward=reward,
        reward_parts={"score": reward},
        correct=reward > 0,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def assert_same(found: list[list[Trajectory]], expected: list[list[Trajectory]]) -> None:
    """Exactly the same trajectories in the same groups: values, types and all."""
    assert [len(group) for group in found] == [len(group) for group in expected]
    for one, other in zip((t for g in found for t in g), (t for g in expected for t in g), strict=True):
        for field in dataclasses.fields(Trajectory):
            value, wanted = getattr(one, field.name), getattr(other, field.name)
            assert type(value) is type(wanted), field.name
            if isinstance(wanted, np.ndarray):
                assert value.dtype == wanted.dtype, field.name
                assert np.array_equal(value, wanted), field.name
            else:
                assert value == wanted, field.name
