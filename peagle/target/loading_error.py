"""Why transformers cannot load a checkpoint, in one line."""

CUSTOM_CODE = (
    "it needs code from the checkpoint, which is never run: use a target whose architecture is"
    " part of transformers"
)


def loading_reason(error: Exception) -> str:
    """The first line of the error; transformers' advice for custom code is not ours."""
    message = str(error).strip() or type(error).__name__
    if "trust_remote_code=True" in message:
        return CUSTOM_CODE
    return message.splitlines()[0]
