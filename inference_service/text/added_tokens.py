"""Tokens beyond a vocabulary: the special ones by role, and those that other files add to tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def tokens_by_role(config: Mapping[str, Any], special_tokens_map: Mapping[str, Any]) -> dict[str, str]:
    """Of tokenizer_config.json and special_tokens_map.json; the first counts if it lists its added tokens, as newer files do."""
    sources = (config, special_tokens_map) if "added_tokens_decoder" in config else (special_tokens_map, config)
    tokens = {}
    for role in ROLES:
        token = next((source[role] for source in sources if source.get(role)), None)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            tokens[role] = content
    return tokens


def add_tokens(
    library: tokenizers.Tokenizer,
    roles: Mapping[str, str],
    config: Mapping[str, Any],
    special_tokens_map: Mapping[str, Any],
    added_tokens: Mapping[str, int],
) -> None:
    """Add to tokenizer.json's tokenizer what `transformers` adds from tokenizer_config.json, special_tokens_map.json and, where the
    first does not list its added tokens, added_tokens.json. Raises TypeError, ValueError or AttributeError for what is no such token.
    """
    extra = [token for source in (config, special_tokens_map) for token in _extra_special_tokens(source)]
    special = {*roles.values(), *(token.content for token in extra)}
    listed: Mapping[str, Any] | None = config.get("added_tokens_decoder")
    if listed is not None:
        library.add_tokens([_added_token(listed[token_id]) for token_id in sorted(listed, key=int)])
    else:
        new = [token for token in sorted(added_tokens, key=added_tokens.__getitem__) if token not in _known(library)]
        library.add_tokens([AddedToken(token, special=token in special, normalized=token not in special) for token in new])
    known = _known(library)
    wanted = [*(AddedToken(token, normalized=False) for token in roles.values()), *extra]
    # The library takes over how a token is matched anew; what was said before counts.
    library.add_special_tokens([known.get(token.content, token) for token in wanted])


def _known(library: tokenizers.Tokenizer) -> dict[str, AddedToken]:
    return {token.content: token for token in library.get_added_tokens_decoder().values()}


def _extra_special_tokens(source: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Those without a role of ROLES: of a role of the model's own ("image_token"), or listed."""
    for role, token in source.items():
        if role.endswith("_token") and role not in ROLES and isinstance(token, str):
            yield AddedToken(token, normalized=False)
    listed = source.get("extra_special_tokens") or source.get("additional_special_tokens") or []
    for token in listed.values() if isinstance(listed, dict) else listed:
        yield _added_token(token)


def _added_token(token: Any) -> AddedToken:
    """From text, or from an object of AddedToken's arguments."""
    if isinstance(token, str):
        return AddedToken(token, normalized=False)
    return AddedToken(**{name: value for name, value in token.items() if name != "__type"})
