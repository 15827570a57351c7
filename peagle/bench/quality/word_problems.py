"""Final numbers in answers to gsm8k."""

import re
from decimal import Decimal, InvalidOperation

NUMBER = re.compile(r"-?\$?(?:\d[\d,]*)?\.?\d+")
FINAL_MARK = "####"


def is_right_number(answer: str, reference: str) -> bool:
    number = answer_number(answer)
    return number is not None and number == reference_number(reference)


def reference_number(reference: str) -> Decimal | None:
    numbers = NUMBER.findall(reference.rsplit(FINAL_MARK, 1)[-1])
    return parse_number(numbers[-1]) if numbers else None


def answer_number(answer: str) -> Decimal | None:
    """The number after ####, in the last \\boxed{}, or after the last `answer is` (or `answer:`).

    Else the last number of the answer.
    """
    if FINAL_MARK in answer and (match := NUMBER.search(answer.split(FINAL_MARK, 1)[1])):
        return parse_number(match[0])
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", answer)
    if boxed and (match := NUMBER.search(boxed[-1])):
        return parse_number(match[0])
    stated = re.split(r"answer(?:\s+is|\s*:)", answer, flags=re.IGNORECASE)
    if len(stated) > 1 and (match := NUMBER.search(stated[-1])):
        return parse_number(match[0])
    numbers = NUMBER.findall(answer)
    return parse_number(numbers[-1]) if numbers else None


def parse_number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").replace("$", "")).normalize()
    except InvalidOperation:
        return None
