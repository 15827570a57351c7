"""Ids of tool calls, by which tool results refer to them."""

import secrets
from string import ascii_letters, digits


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)


def new_mistral_id() -> str:
    """Mistral's chat templates accept ids of exactly 9 letters and digits."""
    return "".join(secrets.choice(ascii_letters + digits) for _ in range(9))
