"""Frames of texts in templates: found only where a template does not look into them."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.data.chat import ChatDeltas
from posttrain.data.frames import PROBE, frame, keeps_track
from posttrain.data.template import parse
from tests.unit.rollout.test_token_contract import KEEP, REWRITE, SCHEMA, TEXTS

REPLIES = st.one_of(
    st.lists(TEXTS.map(lambda text: {"role": "tool", "content": text}), min_size=1, max_size=3),
    TEXTS.map(lambda text: [{"role": "user", "content": text}]),
)


@pytest.mark.parametrize("template", [*KEEP, *REWRITE])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(replies=REPLIES)
def test_a_framed_delta_is_the_rendered_one(qwen, template, replies):
    deltas = ChatDeltas(qwen(template), [SCHEMA])
    first = deltas.text([{**reply, "content": "x"} for reply in replies])
    assert "x" in first
    assert deltas._continued(replies) == deltas._render(replies)


def test_tool_results_are_framed_on_every_template(qwen):
    """Else a turn costs a rendering."""
    for template in [*KEEP, *REWRITE]:
        deltas = ChatDeltas(qwen(template), [SCHEMA])
        deltas.text([{"role": "tool", "content": "x"}])
        assert all(deltas._frames.values()), template


def framed(source):
    environment, _ = parse(source)
    template = environment.from_string(source)
    if not keeps_track(source):
        return None
    return frame(lambda texts: template.render(messages=[{"content": text} for text in texts], x="#"), 1)


@pytest.mark.parametrize(
    ("source", "pieces"),
    [
        ("<{{ messages[0].content }}>", ["<", ">"]),
        ("{{ '<' + messages[0].content + '>' }}", ["<", ">"]),
        ("{% set c = messages[0].content %}{% for m in messages %}{{ loop.index }}{{ c }}{% endfor %}!", ["1", "!"]),
        ("{% if messages[0].content is string %}{{ messages[0].content }}{% endif %}", ["", ""]),
    ],
)
def test_what_is_written_as_it_is_has_a_frame(source, pieces):
    assert framed(source) == pieces


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content | trim }}",
        "{{ messages[0].content.strip() }}",
        "{{ messages[0].content | tojson }}",
        "{{ messages[0].content | e }}",
        "{{ messages[0].content | upper }}",
        "{{ messages[0].content | replace('a', 'b') }}",
        "{{ messages[0].content[:100000] }}",
        "{{ messages[0].content }}{{ messages[0].content }}",
        "{{ messages[0].content }}{{ 'y' if 'x' in messages[0].content }}",
        "{{ messages[0].content }}{{ 'y' if messages[0].content }}",
        "{{ messages[0].content }}{{ 'y' if messages[0].content == x }}",
        "{{ messages[0].content }}{{ 'y' if x == messages[0].content }}",
        "{{ messages[0].content }}{{ 'y' if messages[0].content in ['a', 'b'] }}",
        "{{ messages[0].content }}{{ 'y' if messages[0].content is in ['a', 'b'] }}",
        "{{ messages[0].content }}{{ {'a': 1}[messages[0].content] }}",
        "{{ messages[0].content }}{{ messages[0].content | length }}",
        "{{ messages[0].content }}{{ 'y' if messages[0].content.endswith('x') }}",
        "{% set c = '<' + messages[0].content %}{{ c }}{{ 'y' if 'x' in c }}",
        "{% set c = messages[0].content + '<' %}{{ c }}{{ 'y' if 'x' in c }}",
        "{% set c = '<' ~ messages[0].content %}{{ c }}{{ 'y' if 'x' in c }}",
        "{% set c = '<%s' % messages[0].content %}{{ c }}{{ 'y' if 'x' in c }}",
        "{% set c = [messages[0].content] | join %}{{ c }}{{ 'y' if 'x' in c }}",
        "{% set c = ''.join([messages[0].content]) %}{{ c }}{{ 'y' if 'x' in c }}",
        "{% set c = '{}'.format(messages[0].content) %}{{ c }}{{ 'y' if 'x' in c }}",
        "{% set c %}{{ messages[0].content }}{% endset %}{{ c }}{{ 'y' if 'x' in c }}",
        "{% macro m(c) %}{{ c }}{% endmacro %}{% set c = m(messages[0].content) %}{{ c }}{{ 'y' if 'x' in c }}",
        "{{ messages[0].content }}{% for letter in messages[0].content %}.{% endfor %}",
        "{{ messages[0].content }}{{ 'y' if messages[0].content in x }}",
        "{{ messages[0].content }}{{ 'y' if x.startswith(messages[0].content) }}",
        "{{ messages[0].content }}{{ 'y' if messages[0].content | int }}",
        "nothing",
    ],
)
def test_what_is_looked_into_has_none(source):
    assert framed(source) is None


def test_a_text_may_be_the_probe():
    """Nothing is searched for in what is framed."""
    environment, _ = parse("[{{ messages[0].content }}]")
    template = environment.from_string("[{{ messages[0].content }}]")
    before, after = frame(lambda texts: template.render(messages=[{"content": texts[0]}]), 1)
    assert f"{before}{PROBE}0{after}" == f"[{PROBE}0]"
