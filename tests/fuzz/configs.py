"""Configuration files: the whole tree of keys with values of any kind, and text that is hardly YAML."""

from __future__ import annotations

import tempfile
from typing import Any

import msgspec
import yaml
from hypothesis import strategies as st

from inference_service.config import Config, ConfigError, load_config

DEFAULTS: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(Config()))


def paths(tree: object, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every key of the tree, sections included."""
    found = []
    for key, value in tree.items() if isinstance(tree, dict) else ():
        found += [(*prefix, key), *paths(value, (*prefix, key))]
    return found


PATHS = paths(DEFAULTS)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from(
        [-1, 0, 1, 1.5, 1e-6, 65535, 65536, 2**63, float("inf"), float("nan"), "auto", "echo", "cpu", "", "0", "~", "!!python/x"]
    ),
    st.floats(),
    st.text(max_size=12),
    st.dates(),
    st.binary(max_size=4),
)
anything = st.recursive(
    scalars, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)), max_leaves=6
)
mutations = st.tuples(st.sampled_from(PATHS), st.sampled_from(["value", "value", "value", "unknown key", "non-text key"]), anything)


def mutated(path: tuple[str, ...], how: str, value: object) -> tuple[str, str]:
    """A file with one fault or none, as text; and the key at fault, if it is one."""
    tree: dict[Any, Any] = {}
    node, defaults = tree, DEFAULTS
    for section in path[:-1]:
        defaults = defaults[section]
        node[section] = dict(defaults)
        node = node[section]
    key = {"value": path[-1], "unknown key": f"{path[-1]}_x"}.get(how, 7)
    node[key] = value
    return yaml.dump(tree, allow_unicode=True), str(key)


def check_mutation(mutation: tuple[tuple[str, ...], str, object]) -> str:
    """Load a file with one change. It loads, or the error names the key or the section that it is in."""
    text, key = mutated(*mutation)
    outcome = load(text)
    if outcome != "loaded":
        path = mutation[0]
        named = "as a key" in outcome if mutation[1] == "non-text key" else any(name in outcome for name in (key, *path))
        assert named, f"{outcome!r} names neither {key} nor a section of {path}"
    return "loaded" if outcome == "loaded" else "refused"


def load(text: str) -> str:
    """`loaded`, or the error. Anything but a ConfigError comes through."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)
        file.flush()
        try:
            load_config(file.name)
        except ConfigError as error:
            return str(error).removeprefix(f"{file.name}: ")
    return "loaded"


def check_text(text: str) -> str:
    return "loaded" if load(text) == "loaded" else "refused"


def check_override(override: str) -> str:
    """A `--set` of any text."""
    try:
        load_config(None, [override])
    except ConfigError:
        return "refused"
    return "loaded"


texts = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="abc: -[]{}&*!|>'\"%@`\n\t#,?~0.", max_size=60),
    st.integers(1, 300).map(lambda depth: "[" * depth),
    st.sampled_from(PATHS).map(lambda path: "".join(f"{'  ' * depth}{key}:\n" for depth, key in enumerate(path))),
    st.just("a: &a [*a]\nb: *a\n"),
    st.just("&a\nmodel: *a\n"),
    st.just("a: &a " + "[" * 3 + "lol" + "]" * 3 + "\n"),
)
overrides = st.one_of(
    st.text(max_size=30), st.tuples(st.sampled_from(PATHS), st.text(max_size=12)).map(lambda pair: f"{'.'.join(pair[0])}={pair[1]}")
)
