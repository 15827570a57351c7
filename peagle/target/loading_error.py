"""Why transformers cannot load a checkpoint, in one line."""

CUSTOM_CODE = (
    "it needs code from the checkpoint, which is never run: use a target whose architecture is"
    " part of transformers"
)


def loading_reason(error: Exception) -> str:
    """The first line of the error; transformers' advice for custom code is not ours.

    A first line that ends with a colon is followed by the next one.
    """
    message = str(error).strip()
    if "trust_remote_code=True" in message:
        return CUSTOM_CODE
    if isinstance(error, KeyError) or not message:
        message = f"{type(error).__name__} {message}".rstrip()
    first, *rest = message.splitlines()
    return f"{first} {rest[0].strip()}" if first.endswith(":") and rest else first
