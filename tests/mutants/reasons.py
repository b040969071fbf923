"""Survivors that no test could kill: what changes is no result. By the function or the name, and what was changed."""

REASONS: dict[tuple[str, str], str] = {}
