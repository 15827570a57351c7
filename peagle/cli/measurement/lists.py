"""Lists that are typed with commas: K, concurrencies, tree sizes, numbers, names."""

from collections.abc import Callable
from typing import TypeVar

from peagle.core import check_k
from peagle.errors import UserError

Number = TypeVar("Number", int, float)


def split_words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def parse_ks(text: str) -> tuple[int | str, ...]:
    """3,5,7,11 or auto, or both, without duplicates."""
    ks: list[int | str] = []
    for word in (part.strip() for part in text.split(",")):
        if word != "auto" and not word.isdecimal():
            raise UserError(f"{text!r} is not a list of K: write it like -k 3,5,7,11, or -k auto")
        ks.append(word if word == "auto" else check_k(int(word)))
    return tuple(dict.fromkeys(ks))


def parse_counts(text: str, option: str = "--concurrency") -> tuple[int, ...]:
    """Numbers of 1 or more, without duplicates."""
    words = [part.strip() for part in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise UserError(
            f"{text!r} is not a list of numbers of 1 or more: write it like {option} 1,8,64"
        )
    return tuple(dict.fromkeys(int(word) for word in words))


def parse_trees(text: str) -> tuple[int, ...]:
    """0,16,32, without duplicates; 0 is a chain."""
    words = [part.strip() for part in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise UserError(
            f"{text!r} is not a list of nodes: write it like --tree 32, or --tree 0,16,32"
        )
    return tuple(dict.fromkeys(int(word) for word in words))


def parse_lengths(text: str) -> tuple[int, ...]:
    """512,1k,2k: numbers of tokens, where k is 1,024; ascending, without duplicates."""
    lengths = set()
    for word in (part.strip().lower() for part in text.split(",")):
        digits = word.removesuffix("k")
        if not digits.isdecimal() or not int(digits):
            raise UserError(
                f"{text!r} is not a list of lengths: write it like --context 512,1k,2k,4k,8k"
            )
        lengths.add(int(digits) * (1024 if word.endswith("k") else 1))
    return tuple(sorted(lengths))


def parse_numbers(text: str, kind: Callable[[str], Number], example: str) -> tuple[Number, ...]:
    """Numbers of any kind, without duplicates."""
    return tuple(dict.fromkeys(parse_sequence(text, kind, example)))


def parse_sequence(text: str, kind: Callable[[str], Number], example: str) -> tuple[Number, ...]:
    """Numbers whose order and number count."""
    try:
        return tuple(kind(word) for word in text.split(","))
    except ValueError as error:
        raise UserError(f"{text!r} is not a list of numbers: write it like {example}") from error
