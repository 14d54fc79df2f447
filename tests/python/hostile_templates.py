"""Chat templates that try to exhaust memory, time or stack, some of them random from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator

NUMBERS = ("2", "3", "64", "1000", "10000", "99999", "10**9", "10**14", "2**63", "-1", "9999999999")

VALUES = (
    "ns.x", "ns.y", "ns", "ns.l", "'a'", "'ab\\n' * 1000", "'\\t'", "'%s'", "'{}'", "'%Ks'", "'%*d'", "'{:>K}'",
    "messages", "range(1000)", "(1, 2)", "[1, 2]", "{'a': 1}", "none", "1.5", "K", "loop", "nothing", "f",
)  # fmt: skip

GROWING = (
    "A ~ A", "A ~ B", "A + A", "A + B", "A * K", "K * A", "A ** K", "K ** K", "A % B", "A % (B, B)", "A % (K, 1)",
    "A | join(B)", "A | join", "B.join(A)", "A.replace('a', B)", "A | replace('a', B)", "A.replace('', B)",
    "A | indent(K)", "A | indent(K, true)", "A | indent(width=K)", "A | indent(B, true, true)", "A.format(B)",
    "A.format(B, B)", "A | format(B)", "A | format(B, B)", "A.center(K)", "A.ljust(K)", "A.zfill(K)", "A.rjust(K, 'b')",
    "A | center(K)", "A | list", "A | list | list", "[A, A]", "[A, B, A]", "(A, A)", "{A: B}", "{'k': A, 'l': A}",
    "[[A]]", "A | tojson", "A | tojson(indent=K)", "A | string", "A | pprint", "A | map('upper') | list",
    "A | map('indent', K) | list", "A | map('replace', 'a', B) | list", "A | map('list') | list",
    "A | map(attribute='x') | list", "A | sort", "A | sort | join(B)", "A | unique | list", "A | groupby(0) | list",
    "A | select('in', B) | list", "A | reject('eq', B) | list", "A == B", "A < B", "A in B", "A not in B", "A is in(B)",
    "A is eq(B)", "A[::-1]", "A[::2]", "A[K:]", "A[B]", "A | upper", "A | title", "A.swapcase()", "A | capitalize",
    "A | batch(K) | list", "A | batch(K, B) | list", "A | slice(K) | list", "A | slice(K, B) | list", "A.split('a')",
    "A.split()", "A.rsplit('b')", "A.splitlines()", "A | urlencode", "A | e", "A | e | e", "range(K) | list",
    "range(0, K, 1)", "A | sum", "A | sum(start=B)", "dict(a=A, b=B)", "A.expandtabs(K)", "A | reverse | list",
    "A | reverse | join(B)", "A | truncate(K)", "A | wordcount", "A | striptags", "A | wordwrap(K)", "A | min",
    "A | max", "A | length", "A | items | list", "A | dictsort", "A.items() | list", "A | first", "A | last | list",
    "namespace(x=A)", "namespace(A)", "strftime_now(A)", "strftime_now('%K Y')", "f(A)", "f(f(A))", "A | trim(B)",
    "A.strip(B)", "A.count(B)", "A.index(B)", "A.find(B)", "A.startswith(B)", "A.encode()", "A.title().upper()",
    "A | round(K)", "A | int(K)", "A | abs", "A | float", "A | default(B)", "A | attr('x')", "A | xmlattr",
    "A | filesizeformat", "cycler(A, B).next()", "joiner(A)()", "A.copy()", "A.keys() | list", "A | random",
    "lipsum(K)", "A // B", "A / B", "-A", "not A", "A if B else A", "A and B", "A.partition('a')",
    "A | tojson | tojson | tojson",
)  # fmt: skip

_START = (
    "{% set ns = namespace(x='ab', y='xyz', l=[1, 'a']) %}"
    "{% macro f(x) %}{% if x %}{{ x }}{{ x }}{% endif %}{% endmacro %}"
    "{% macro g(x) %}{% set ns.x = [x, x] %}{{ g([x]) }}{% endmacro %}"
)


def bombs() -> Iterator[str]:
    """Yield handwritten templates, one for each kind of attack."""
    depth = 20_000
    yield "{{ " + "(" * depth + "1" + ")" * depth + " }}"
    yield "{{ " + "[" * depth + "]" * depth + " }}"
    yield "{{ " + "-" * depth + "1 }}"
    yield "{{ " + "not " * depth + "1 }}"
    yield "{{ 1" + "+1" * 100_000 + " }}"
    yield "{{ x" + "+1" * 100_000 + " }}"
    yield "{{ 1" + " ~ 'a'" * 40_000 + " }}"
    yield "{{ x" + ".y" * 100_000 + " }}"
    yield "{{ x" + "|e" * 100_000 + " }}"
    yield "{{ x" + "()" * 100_000 + " }}"
    yield "{{ x" + "[0]" * 80_000 + " }}"
    yield "{{ 1" + " if x else 1" * 20_000 + " }}"
    yield "{{ 1" + " < 1" * 50_000 + " }}"
    yield "{% if x %}" + "{% elif x %}" * 20_000 + "{% endif %}"
    yield "{% if x %}" * 10_000 + "{% endif %}" * 10_000
    yield "{% for a in [1] %}" * 5_000 + "{% endfor %}" * 5_000
    yield "{% macro f() %}" * 5_000 + "{% endmacro %}" * 5_000
    yield "{% set a %}" * 9_000 + "x" + "{% endset %}" * 9_000
    yield "{% filter e %}" * 9_000 + "x" + "{% endfilter %}" * 9_000
    yield "x" * 10_000_000
    yield "{% for i in range(99999) %}" + "x" * 200_000 + "{% endfor %}"
    yield "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    yield "{% set a %}{% for i in range(99999) %}" + "x" * 99_999 + "{% endfor %}{% endset %}"
    yield "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}"
    called = "{% macro g() %}{% call f() %}{{ g() }}{% endcall %}{% endmacro %}{{ g() }}"
    yield "{% macro f() %}{{ caller() }}{% endmacro %}" + called
    yield "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}"
    yield "{% for i in [[1]] recursive %}{{ loop([[i, i]]) }}{% endfor %}"
    yield "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}{{ ns | tojson }}{{ ns == ns }}"
    yield "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns.a }}{{ ns.a | string }}{{ ns.a == ns.a }}"
    yield "{% set a = namespace() %}{% set b = namespace(a=a) %}{% set a.b = b %}{{ a }}{{ [a] | sort }}"
    yield "{% set ns = namespace(a=1) %}{% for i in range(99999) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a }}"
    nested = "{% set ns = namespace(a=1) %}{% for j in range(99) %}{% for i in range(99999) %}{% set ns.a = "
    yield nested + "[ns.a] %}{% endfor %}{% endfor %}"
    yield nested + "{'k': ns.a} %}{% endfor %}{% endfor %}{{ ns.a | tojson }}"
    yield nested + "(ns.a, ) %}{% endfor %}{% endfor %}"
    yield nested + "[ns.a] + [1] %}{% endfor %}{% endfor %}"
    yield nested + "[ns.a] | list %}{% endfor %}{% endfor %}"
    yield nested + "ns.a | batch(1) %}{% endfor %}{% endfor %}"
    yield nested + "[ns.a] | map('list') %}{% endfor %}{% endfor %}"
    yield nested + "dict(k=ns.a) %}{% endfor %}{% endfor %}"
    yield nested + "namespace(k=ns.a) %}{% endfor %}{% endfor %}"
    yield nested + "cycler(ns.a) %}{% endfor %}{% endfor %}"
    yield nested + "ns.a ~ 'x' %}{% endfor %}{% endfor %}"
    doubled = "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}"
    for used in ("ns.a", "ns.a | string", "ns.a | tojson", "ns.a == [ns.a]", "ns.a | join", "ns.a ~ ''", "'%s' % ns.a",
                 "'{}'.format(ns.a)", "ns.a | pprint", "{ns.a: 1}", "ns.a in [ns.a]", "ns.a | sort", "ns.a | urlencode",
                 "[ns.a] | unique | list", "ns.a | e", "ns.a | upper", "ns.a | replace('a', 'b')", "ns.a is eq ns.a",
                 "ns.a | sum", "ns.a | trim", "ns.a | indent", "raise_exception(ns.a)", "ns.a | max", "ns.a < ns.a",
                 "ns.a | length", "ns.a | title", "ns.a | wordcount", "ns.a | format", "ns.a | int",
                 "ns.b[ns.a]"):  # fmt: skip
        yield doubled + "{{ " + used + " }}"
    for grown in ("ns.a ~ ns.a", "ns.a + ns.a", "ns.a * 2", "ns.a | replace('x', 'xx')", "ns.a.replace('x', 'xx')",
                  "[ns.a, ns.a] | join", "'%s%s' % (ns.a, ns.a)", "'{0}{0}'.format(ns.a)", "ns.a | e | e | e",
                  "ns.a | indent(9, true)", "ns.a | urlencode | urlencode", "ns.a | tojson | tojson"):  # fmt: skip
        yield "{% set ns = namespace(a='x&') %}{% for i in range(60) %}{% set ns.a = " + grown + " %}{% endfor %}"
        yield (
            "{% set ns = namespace(a='x&\\n') %}{% for i in range(60) %}{% set ns.a %}{{ "
            + grown
            + " }}{% endset %}{% endfor %}"
        )
    listed = "{% set ns = namespace(l=['a']) %}{% for i in range(60) %}{% set ns.l = ns.l + ns.l %}{% endfor %}"
    yield listed
    yield listed + "{{ ns.l | length }}"
    yield listed + "{{ ns.l }}"
    large = "{% set x = 'ab ' * 3000000 %}"
    for used in ("x | list", "x.split()", "x | list | sort", "x.split('a') | join('bb')", "x | map('upper') | list",
                 "x | batch(1) | list", "x[::-1]", "x == x ~ ''", "x.center(99999999)", "x | wordwrap(1)"):  # fmt: skip
        yield large + "{{ (" + used + ") | length }}"
        yield large + "{% for i in range(99999) %}{% set y = (" + used + ") | length %}{% endfor %}"
    yield large + "{% for i in range(99999) %}{% if x ~ 'a' in x %}{% endif %}{% endfor %}"
    yield large + "{% macro f(n) %}{% set y = x ~ n %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}"
    yield large + "{% for i in range(99999) %}{% set y = {x: 1} %}{% endfor %}"
    yield large + "{% set d = {} %}{% for i in range(99999) %}{% if d[x] %}{% endif %}{% endfor %}"
    yield "{% set l = range(99999) | list %}{% for i in range(99999) %}{% if i in l %}{% endif %}{% endfor %}"
    yield "{% set l = range(99999) | list %}{% for i in range(99999) %}{% if l == l %}{% endif %}{% endfor %}"
    yield "{% set l = range(99999) | list %}{% for i in range(99999) %}{% set k = l | sort %}{% endfor %}"
    yield "{{ " + " ~ ".join(["'a' * 99999999"] * 900) + " }}"
    yield "{% set a = [" + ", ".join(["'a' * 99999999"] * 900) + "] %}"
    yield "{% set a = [" + ", ".join(["[1] * 9999999"] * 900) + "] %}"
    yield "{{ 10 ** 10 ** 10 }}"
    yield "{{ 9 ** 9 ** 9 ** 9 }}{{ 2 ** 999999999 }}"
    yield "{% set ns = namespace(a=2) %}{% for i in range(99) %}{% set ns.a = ns.a * ns.a %}{% endfor %}{{ ns.a }}"
    yield "{{ '%99999999999d' % 1 }}{{ '%.99999999f' % 1.5 }}{{ '{:99999999999}'.format(1) }}"
    yield "{{ '{:" + "0" * 100 + "99999999999}' | format(1) }}{{ '{:" + "0" * 100 + "99999999999}'.format(1) }}"
    yield "{{ strftime_now('%Y' * 1000000) }}{{ strftime_now('%999999999Y') }}"
    yield nested + "(ns.a, ) %}{% endfor %}{% if i == 9 %}{% if {ns.a: 1} %}{% endif %}{% endif %}{% endfor %}"
    yield (
        "{% set ns = namespace(a=[1] * 1) %}"
        + "{% for i in range(99999) %}" * 2
        + "{% set ns.a = ns.a "
        + "| chain " * 140
    )
    yield "{{ ('a' * 1000000) | replace('a', [1] * 600) }}{{ ([1] * 20000) | join([1] * 30000) }}"
    yield "{{ ([1] * 20000) | join(d='x' * 100000) }}{{ ([1] * 3000) | tojson(separators=('a' * 1000000, ':')) }}"
    yield "{% set ns = namespace() %}{% set ns.a = dict(k=ns) %}{{ ns }}"
    yield doubled + "{{ ns.a % 2 }}{{ {'a': 1} | attr(ns.a) }}"
    yield doubled + "{{ {'a': 1}[ns.a or 'c'] }}"
    yield "{{ ('a' * 8000000).strip('b' * 4000000 ~ 'a') }}{{ ('a' * 8000000).rfind('ab' ~ 'a' * 4000000) }}"
    yield "{{ ('a' * 16000).translate({97: 'b' * 1000000}) }}"
    yield "{{ 'x'.encode() * 10 ** 9 }}{{ (3).to_bytes(1900000000, 'big') }}"
    yield "{{ '{0:{1}}'.format('a', '1500000000') }}"
    kept = "{% for i in range(9999) %}{% set ns.a = ns.a + [dict(a=1).keys() - []] %}{% endfor %}"
    yield "{% set ns = namespace(a=[]) %}" + kept
    yield "{% for i in range(99999) %}" * 3 + "{% set x = i // 7 %}" + "{% endfor %}" * 3
    yield "{% for a in b %}" * 60 + "x" + "{% endfor %}" * 60
    yield "{% include 'x' %}"
    yield "{% extends 'template' %}"
    yield "{% import 'template' as t %}{{ t }}"
    yield "{% block a %}{{ self.a() }}{% endblock %}"
    yield "{{ range(10**18) | list | length }}{{ range(-(10**18), 10**18) | sum }}"
    yield "{{ lipsum(n=1000000) }}"
    yield "{{ ''.__class__.__mro__ }}{{ messages.__class__ }}"


def templates(seed: int, count: int) -> Iterator[str]:
    """Yield ``count`` templates: those of :func:`bombs`, then random ones."""
    n = 0
    for bomb in bombs():
        if n == count:
            return
        n += 1
        yield bomb
    rng = random.Random(seed)
    while n < count:
        n += 1
        yield _START + _statements(rng, 3)


def _value(rng: random.Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.5:
        return rng.choice(VALUES[:4] if rng.random() < 0.6 else VALUES)
    return f"({_growth(rng, depth - 1)})"


def _growth(rng: random.Random, depth: int) -> str:
    made = rng.choice(GROWING)
    for letter in "AB":
        made = made.replace(letter, _value(rng, depth))
    return made.replace("K", rng.choice(NUMBERS))


def _statements(rng: random.Random, depth: int) -> str:
    return "".join(_statement(rng, depth) for _ in range(rng.randrange(1, 4)))


def _statement(rng: random.Random, depth: int) -> str:
    expression = _growth(rng, 2)
    kind = rng.randrange(9) if depth else rng.randrange(4)
    if kind == 0:
        return f"{{{{ {expression} }}}}"
    if kind <= 2:
        return f"{{% set ns.{rng.choice('xyl')} = {expression} %}}"
    if kind == 3:
        return f"{{% if {expression} %}}x{{% endif %}}"
    if kind == 4:
        return f"{{% set ns.{rng.choice('xy')} %}}{_statements(rng, depth - 1)}{{% endset %}}"
    if kind == 5:
        return f"{{{{ {rng.choice('fg')}({expression}) }}}}"
    over = rng.choice(("range(60)", "range(99999)", "range(9999)", "ns.x", "ns.l", expression))
    if kind == 6:
        return f"{{% for i in {over} recursive %}}{_statements(rng, depth - 1)}{{{{ loop([i, ns.x]) }}}}{{% endfor %}}"
    return f"{{% for i in {over} %}}{_statements(rng, depth - 1)}{{% endfor %}}"
