"""Values between the judge and the candidate: plain data in frames of bounded size.

Neither pickle nor marshal: what the candidate sends is hostile. A value is one byte for its type,
four bytes for a length, and a payload; a container's length counts its items,
a dict's its keys and values.

    encode([1, "a"]) == b"l" 00000002  b"i" 00000001 b"1"  b"s" 00000001 b"a"

Subclasses travel as their plain base, so no `__eq__` of the candidate is ever asked.
"""

import os
import sys

MAX_FRAME_BYTES = 8 << 20
MAX_ITERATOR_ITEMS = 100_000
CONTAINERS: dict[type, bytes] = {list: b"l", tuple: b"t", set: b"e", frozenset: b"z"}
CONTAINER_TYPES = {tag: kind for kind, tag in CONTAINERS.items()}
EXACT_NUMBERS = {b"Q": ("fractions", "Fraction"), b"D": ("decimal", "Decimal")}


class UnsupportedValue(Exception):
    """A value that is no plain data, such as a function or an instance of a class."""


def encode(value: object) -> bytes:
    if value is None or value is True or value is False:
        return pack({None: b"N", True: b"T", False: b"F"}[value], b"")
    if isinstance(value, int):
        return pack(b"i", format(int(value), "x").encode())
    if isinstance(value, float):
        return pack(b"f", float.hex(value).encode())
    if isinstance(value, str):
        return pack(b"s", str.encode(value, "utf-8", "surrogatepass"))
    if isinstance(value, (bytes, bytearray)):
        return pack(b"b" if isinstance(value, bytes) else b"a", bytes(value))
    if isinstance(value, complex):
        return pack(b"c", f"{value.real.hex()} {value.imag.hex()}".encode())
    if isinstance(value, range):
        return pack(b"r", f"{value.start} {value.stop} {value.step}".encode())
    for kind, tag in CONTAINERS.items():
        if isinstance(value, kind):
            return pack_items(tag, list(kind.__iter__(value)))  # type: ignore[attr-defined]
    if isinstance(value, dict):
        return pack_items(b"d", [part for item in dict.items(value) for part in item])
    return encode_rare(value)


def encode_rare(value: object) -> bytes:
    for tag, (module, name) in EXACT_NUMBERS.items():
        if module in sys.modules and isinstance(value, getattr(sys.modules[module], name)):
            return pack(tag, str(value).encode())
    if hasattr(type(value), "__next__"):
        items: list[object] = []
        for item in value:  # type: ignore[attr-defined]
            items.append(item)
            if len(items) > MAX_ITERATOR_ITEMS:
                raise UnsupportedValue(f"an iterator of more than {MAX_ITERATOR_ITEMS:,} items")
        return pack_items(b"g", items)
    raise UnsupportedValue(f"a value of type {type(value).__name__}")


def pack(tag: bytes, payload: bytes) -> bytes:
    return tag + len(payload).to_bytes(4, "big") + payload


def pack_items(tag: bytes, items: list[object]) -> bytes:
    return tag + len(items).to_bytes(4, "big") + b"".join(map(encode, items))


def decode(data: bytes) -> object:
    """Raises ValueError or TypeError for data that encode() does not make."""
    value, end = decode_at(data, 0)
    if end != len(data):
        raise ValueError("bytes after the value")
    return value


def decode_fields(data: bytes) -> dict:
    fields = decode(data)
    if not isinstance(fields, dict):
        raise ValueError("no dict")
    return fields


def decode_at(data: bytes, at: int) -> tuple[object, int]:
    tag, count = data[at : at + 1], int.from_bytes(data[at + 1 : at + 5], "big")
    at += 5
    if len(data) < at or not tag:
        raise ValueError("cut off")
    if tag not in CONTAINER_TYPES and tag not in b"dg":
        if len(data) < at + count:
            raise ValueError("cut off")
        return decode_scalar(tag, data[at : at + count]), at + count
    items: list[object] = []
    for _ in range(count):
        item, at = decode_at(data, at)
        items.append(item)
    if tag == b"d":
        return dict(zip(items[::2], items[1::2], strict=True)), at
    return (iter(items) if tag == b"g" else CONTAINER_TYPES[tag](items)), at


def decode_scalar(tag: bytes, payload: bytes) -> object:
    if tag in b"NTF":
        return {b"N": None, b"T": True, b"F": False}[tag]
    if tag in b"ba":
        return payload if tag == b"b" else bytearray(payload)
    text = payload.decode("utf-8", "surrogatepass")
    if tag == b"s":
        return text
    if tag == b"i":
        return int(text, 16)
    if tag == b"f":
        return float.fromhex(text)
    if tag == b"c":
        return complex(*map(float.fromhex, text.split()))
    if tag == b"r":
        return range(*map(int, text.split()))
    module, name = EXACT_NUMBERS[tag]
    return getattr(__import__(module), name)(text)


def write_frame(descriptor: int, data: bytes) -> None:
    if len(data) > MAX_FRAME_BYTES:
        raise UnsupportedValue(f"a value of more than {MAX_FRAME_BYTES >> 20} MiB")
    view = memoryview(len(data).to_bytes(4, "big") + data)
    while view:
        view = view[os.write(descriptor, view) :]


def read_frame(descriptor: int) -> bytes:
    """Raises EOFError at the end, ValueError for a frame that is too long."""
    size = int.from_bytes(read_exactly(descriptor, 4), "big")
    if size > MAX_FRAME_BYTES:
        raise ValueError("the frame is too long")
    return read_exactly(descriptor, size)


def read_exactly(descriptor: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(descriptor, min(size - len(data), 1 << 16))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)
