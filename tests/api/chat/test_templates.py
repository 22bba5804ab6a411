"""Chat templates: those that take too much memory or time are stopped, and all others render as Jinja does."""

from __future__ import annotations

import json
import time
from itertools import count
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlx_ring.api.chat import template_limits
from mlx_ring.api.chat.request import Conversation
from mlx_ring.api.chat.templates import render
from mlx_ring.core.errors import RequestError
from mlx_ring.head.served_model import prepare_model
from mlx_ring.settings.settings_sources import load_settings

MESSAGES: list[dict[str, object]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße 🙂 <b>"},
    {"role": "assistant", "content": "Hi.", "reasoning_content": "So."},
    {"role": "user", "content": ""},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "function": {
                    "name": "find",
                    "arguments": {
                        "since": 1_700_000_000,
                        "id": -1,
                        "all": True,
                        "big": 10**20,
                        "name": "a",
                        "no": None,
                    },
                }
            }
        ],
    },
    {"role": "tool", "content": "call 5551234567 {0} %99999999999d {:>99999999999}"},
]

CALLS = """
{%- for m in messages %}{%- for call in m.tool_calls or [] %}
    {%- for key, value in call.function.arguments|items %}
        {{- '<arg>' ~ key ~ '=' }}VALUE
    {%- endfor %}
{%- endfor %}{%- endfor %}
"""
"""Loop over the arguments of calls, as in the templates of Qwen3-Coder and GLM-4.5."""


NESTED = (
    "{% set ns = namespace(l=['x'] * 100) %}{% for i in range(9) %}{% set ns.l = [ns.l] * 100 %}{% endfor %}"
)
"""Start of a template with a list of a few entries, whose text would have 10 to the power of 20 characters."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return prepare_model(load_settings({"model": "demo"})).tokenizer


def _to_json(value: object, indent: int | None = None, *, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def rendered(tokenizer: Any, source: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", source)
    text = render(tokenizer, Conversation(MESSAGES))
    assert isinstance(text, str)
    return text


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 9999999999 }}",
        "{{ 9999999999 * 'x' }}",
        "{% if false %}{{ 'x' * 9999999999 }}{% endif %}{{ [0] * 9999999999 }}",
        "{{ 10 ** 9999999 }}",
        "{{ 'x' | center(9999999999) }}",
        "{{ 'x' | indent(9999999999) }}",
        "{{ 'x'.ljust(9999999999) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 9999999999) }}",
        "{{ lipsum(n=9999999999) }}",
        "{{ range(999999999) | list }}",
        "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        NESTED + "{{ ns.l | tojson }}",
        NESTED + "{{ ns.l }}",
        NESTED + "{{ ns.l ~ '' }}",
        NESTED + "{{ ns.l == [ns.l, 1] }}{{ [ns.l] == [[ns.l] + []] }}",
        NESTED + "{{ ns.l | string | length }}",
        NESTED + "{{ {'a': ns.l}.items() }}",
        NESTED + "{{ ns }}",
        NESTED + "{{ '%s' % (ns.l,) }}",
        NESTED + "{{ '{}'.format(ns.l) }}",
        NESTED + "{{ '{!r}'.format(ns.l) }}",
        "{% set ns = namespace(t=(1, 2)) %}{% for i in range(60) %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}{{ {ns.t: 1} }}",
        "{% set ns = namespace(t=(1, 2)) %}{% for i in range(60) %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}{{ {}.get(ns.t) }}",
        "{% set ns = namespace(t=(1, 2)) %}{% for i in range(60) %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}{{ {}[ns.t] }}",
        "{% set ns = namespace(t=(1, 2)) %}{% for i in range(60) %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}{{ ns.t in {} }}",
        "{# " + "x" * (1 << 20) + " #}",
        "{{ (['x' * 1000] * 1000000) | join | length }}",
        "{{ ''.join(['x' * 1000] * 1000000) | length }}",
        "{{ ''.join(['x' * 1000] * 1000000 | map('upper')) | length }}",
        "{{ ('x' * 100000) | replace('x', 'y' * 10000) | length }}",
        "{{ ('x' * 100000) | replace(new='y' * 10000, old='x') | length }}",
        "{{ ('x' * 20000).replace('x', 'y' * 50000) | length }}",
        "{{ ('x' * 20000).replace('', 'y' * 50000) | length }}",
        "{{ ('x' * 20000).encode().replace('x'.encode(), ('y' * 50000).encode()) | length }}",
        "{{ ('x' * 20000).translate({120: 'y' * 50000}) | length }}",
        "{{ ('x' * 20000).translate(['y' * 50000] * 128) | length }}",
        "{{ '{:>٩٩٩٩٩٩٩}'.format('x') | length }}",
        "{{ 'a' }}" * 20000,
        "{{ [" + "1," * 60000 + "] | length }}",
        "{{ ('\t' * 20000).expandtabs(50000) | length }}",
        "{{ ('x' * 1000000).split('x') | length }}" + "{{ [0] * 9999999 }}",
        "{{ (('%(a)s' * 100000) % {'a': 'x' * 1000}) | length }}",
        "{{ (('{0}' * 10000).format('x' * 1000)) | length }}",
        "{{ ('%99999s' * 1000) % ((1,) * 1000) }}",
        "{{ '%.*f' % (9999999999, 1.5) }}",
        "{{ '{a:>{b}}'.format_map({'a': 1, 'b': 9999999999}) }}",
        "{{ ('a\n' * 100000) | indent(width=100000) | length }}",
        "{{ [1, 2] | batch(fill_with=1, linecount=9999999999) | list }}",
        "{{ [1] | tojson(indent=9999999999) }}",
        "{{ [[1]] * 1000 | tojson(separators=('x' * 100000, ':')) }}",
        "{{ 1 | round(99999999, 'floor') }}",
        "{{ (5).to_bytes(99999999999) }}",
        "{{ 'f' * 1000000 | int(base=16) * 1000000 }}{{ ('f' * 1000000) | int(0, 16) // 3 }}",
        "{{ ('<' * 1000000) | striptags }}",
        "{{ ([[1] * 1000] * 100000) | sum(start=[]) | length }}",
        "{{ ('a' * 1000000).rfind('b' + 'a' * 500000) }}",
        "{{ ('a' * 1000000).strip('b' * 500000 + 'a') }}",
        "{{ ('a' * 1000000) | trim('b' * 500000 + 'a') }}",
        "{{ ('x' * 1000000 ~ 'a') in [('x' * 1000000) + 'b'] * 1000000 }}",
        "{% for a in range(9) %}" * 30 + "{% endfor %}" * 30,
    ],
)
def test_a_template_that_makes_too_much_is_refused(
    tokenizer: Any, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "_MOST_CHARACTERS", 1 << 20)
    monkeypatch.setattr(template_limits, "_MOST_ENTRIES", 1 << 20)
    with pytest.raises(RequestError, match="chat template rejects these messages: "):
        rendered(tokenizer, source, monkeypatch)


@pytest.mark.parametrize(
    ("made", "times"),
    [
        ("'x' * 400000", 16),
        ("'é' * 100000", 16),
        ("[0] * 100000", 8),
        ("('ab,' * 8000).split(',')", 8),
        ("range(9000) | list", 8),
        ("dict.fromkeys(range(9000))", 8),
    ],
)
def test_all_that_a_rendering_makes_is_limited_in_bytes(
    tokenizer: Any, made: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "_MOST_BYTES", 1 << 22)
    source = "{% for i in range(TIMES) %}{{ (MADE) | length }} {% endfor %}".replace("MADE", made)
    with pytest.raises(RequestError, match="texts and lists take more than 4 MiB in all"):
        rendered(tokenizer, source.replace("TIMES", str(times)), monkeypatch)
    assert rendered(tokenizer, source.replace("TIMES", str(times // 8)), monkeypatch)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set l = [0] * 1000000 %}{% for i in range(200) %}{{ l | sum }}{% endfor %}",
        "{% set l = [0] * 1000000 %}{{ l | map('string') | map('upper') | unique | list }}",
        "{% set s = 'x' * 1000000 %}{% for i in range(99999) %}{{ s.upper() | length }}{% endfor %}",
        "{% set s = [0] * 40000 %}{% for i in range(99999) %}{{ s[1:] | length }}{% endfor %}",
        "{% set l = ['x'] * 100000 %}{% for i in range(255) %}{{ l + [1] == l + [2] }}{% endfor %}",
    ],
    ids=["loops", "filtered loops", "output", "macros", "sums", "maps", "methods", "slices", "comparisons"],
)
def test_a_template_that_takes_too_long_is_refused(
    tokenizer: Any, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each look at the clock is a second later, so that no machine is too fast for the limit.
    monkeypatch.setattr(time, "thread_time", count().__next__)
    with pytest.raises(RequestError, match="takes more than 5 s of processor time"):
        rendered(tokenizer, source, monkeypatch)
    # The limits are those of one rendering: the next one starts anew.
    assert rendered(tokenizer, "{{ messages | length }}", monkeypatch) == "6"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m['content'] | trim }}{% if not loop.last %}\n{% endif %}\n{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ loop.index0 ~ ':' ~ m.content ~ none ~ nothing }};{% endfor %}",
        (
            "{% macro show(m) %}[{{ m.role }}{{ caller() if caller else '' }}]{% endmacro %}"
            "{% for m in messages[1:] %}{{ show(m) }}{% call show(m) %}!{% endcall %}{% endfor %}"
        ),
        (
            "{% set ns = namespace(last=0, text='') %}{% for m in messages %}{% set ns.last = ns.last + 1 %}"
            "{% set ns.text = ns.text + m.content %}{% endfor %}{{ ns.last * 2 }}{{ ns.text }}{{ 2 ** 5 }}{{ 7 % 4 }}"
        ),
        "{{ '%s-%03d' % (messages[0].role, 7) }}{{ '{:>8}'.format('a') }}{{ '%.2f' | format(1.5) }}{{ '-' * 12 }}",
        "{% for a in range(3) recursive %}{{ a }}{% else %}none{% endfor %}{% for b in [] %}{% else %}empty{% endfor %}",
        "{% set text %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ text | length }}{{ text | upper }}",
        "{{ messages | map(attribute='role') | join(', ') }}{{ 'a\nb' | indent(2) }}{{ [1, 2] + [3] }}",
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
        "{{ messages[0] }}{{ (1, [2]) }}{{ none }}{{ nothing }}{{ 1.5 }}{{ {'a': messages | length} | string }}",
        "{{ messages[0] | tojson }}{{ bos_token }}{{ add_generation_prompt }}",
        CALLS.replace(
            "VALUE",
            "{%- set value = value | tojson | safe if value is mapping or (value is sequence and value is not string) "
            "else value | string %}{{ value }}",
        ),
        CALLS.replace("VALUE", "{{ value | tojson(ensure_ascii=False) if value is not string else value }}"),
        CALLS.replace(
            "VALUE", "{{ value ~ '' }}{{ '%s' % value }}{{ '%s' | format(value) }}{{ '{}'.format(value) }}"
        ),
        "{% macro show(n) %}{{ n }}{% endmacro %}{{ show(1700000000) }}{{ 'id ' ~ 1700000000 }}{{ '%d' % 1700000000 }}",
        "{{ '%s: %s' | format(messages[5].role, messages[5].content) }}",
        "{{ '%s|%5s|%-4d|%%' % (messages[5].content, 'a', 3) }}{{ '%(n)s' | format(n=messages[5].content) }}",
        "{{ messages[5].content.replace('5551234567', '1') }}{{ '{:,}'.format(1700000000) }}{{ 1700000000 | string }}",
        "{{ '%(name)s %(text)s' | format(name='a', text='b') }}{{ 'a' | replace(new='b', old='a') }}{{ [3, 1] | sum }}",
        "{{ messages | sum(attribute='n', start=5) if false else '' }}{{ [{'n': 1}, {'n': 2}] | sum('n') }}{{ messages[1:3][0].role }}",
        "{{ 1 < 2 < 3 }}{{ 'a' not in ['b'] }}{{ messages[-1:][0].role != 'user' }}{{ 2 is divisibleby(2) }}{{ 'x'[::-1] }}",
        "{{ messages[5].content.split('call')[-1].strip() }}{{ ['b', 'a'] | sort | join('-') }}{{ 'a' is in ['a'] }}",
        "{{ messages[4].tool_calls[0] | tojson(indent=4) }}{{ namespace(a=1700000000).a }}{{ dict(a=1700000000) }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ undefined_name in [none] }}",
    ],
)
def test_ordinary_templates_render_as_without_limits(
    tokenizer: Any, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    plain.filters["tojson"] = _to_json
    expected = plain.from_string(source).render(
        messages=MESSAGES, add_generation_prompt=True, **tokenizer._tokenizer.special_tokens_map
    )
    assert rendered(tokenizer, source, monkeypatch) == expected


def test_a_template_s_own_refusal_is_its_text(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="rejects these messages: roles must alternate"):
        rendered(tokenizer, "{{ raise_exception('roles must alternate') }}", monkeypatch)


def test_the_model_s_own_template_renders_as_without_limits(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tokenizer._tokenizer.chat_template
    from transformers.utils import chat_template_utils as own

    text = rendered(tokenizer, source, monkeypatch)
    compiled: Any = own._cached_compile_jinja_template(source)  # pyright: ignore[reportPrivateUsage]
    assert text == compiled.render(
        messages=MESSAGES, add_generation_prompt=True, **tokenizer._tokenizer.special_tokens_map
    )
