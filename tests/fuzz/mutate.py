"""Seeded damage to valid inputs: what a fuzzer without coverage does, at tens of thousands of cases a second."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.message import Message

ODD_NUMBERS = (b"0", b"-1", b"255", b"65536", b"4294967296", b"9223372036854775808", b"1e999", b"NaN", b"-0.0", b"0x7f")
ODD_BYTES = (
    b"\x00",
    b"\xff" * 8,
    b"\x80" * 10,
    b"\n",
    b'"',
    b"{",
    b"[",
    b"[" * 200,
    b": ",
    b"- ",
    b"\xe2\x80\xa8",
    b"\xc3(",
)
ODD_VALUES: tuple[object, ...] = (
    None, True, 0, -1, 1 << 63, 1 << 200, 0.5, float("nan"), float("inf"), "", "x" * 300, "\x00", [], {}, [[]],
    {"a": 1},
)  # fmt: skip
MAX_BYTES = 1 << 16


def mutations(corpus: Sequence[bytes], words: Sequence[bytes], seed: int, count: int) -> Iterator[bytes]:
    """`count` damaged inputs; the same ones for the same seed."""
    rng = random.Random(seed)
    parsed = [value for sample in corpus if (value := _json(sample)) is not None]
    for _ in range(count):
        if parsed and rng.random() < 0.5:
            yield json.dumps(_damaged_value(rng, rng.choice(parsed))).encode()
        else:
            data = rng.choice(corpus)
            for _ in range(1 + rng.randrange(4)):
                data = _damaged(rng, data, corpus, words)
            yield data[:MAX_BYTES]


def _damaged(rng: random.Random, data: bytes, corpus: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((1, 2, 4, 16, 64)))
    kind = rng.randrange(9)
    if kind == 0 and data:
        at = rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        return data[:at] + rng.randbytes(end - at) + data[end:]
    if kind == 2:
        return data[:at] + data[end:]
    if kind == 3:
        return data[:at] + data[at:end] * rng.choice((2, 3, 50)) + data[end:]
    if kind == 4:
        return data[:at]
    if kind == 5:
        other = rng.choice(corpus)
        return data[:at] + other[rng.randrange(len(other) + 1) :]
    if kind == 6:
        return data[:at] + rng.choice(ODD_NUMBERS) + data[end:]
    if kind == 7 and words:
        return data[:at] + rng.choice(words) + data[end:]
    return data[:at] + rng.choice(ODD_BYTES) + data[at:]


def damaged_message(rng: random.Random, sample: Message) -> Message:
    """A copy of a protobuf message with one to three of its fields, at any depth, set to something odd."""
    message = type(sample)()
    message.CopyFrom(sample)
    for _ in range(1 + rng.randrange(3)):
        _damage_field(rng, message)
    return message


def _damage_field(rng: random.Random, message: Any) -> None:
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    field = rng.choice(fields)
    value = getattr(message, field.name)
    if rng.random() < 0.1:
        message.ClearField(field.name)
    elif field.is_repeated:
        if field.message_type is not None:
            _damage_field(rng, rng.choice(value) if value and rng.random() < 0.7 else value.add())
        else:
            value.extend([_odd(rng, field, 0)] * rng.choice((1, 2, 1000)))
    elif field.message_type is not None:
        _damage_field(rng, value)
    else:
        setattr(message, field.name, _odd(rng, field, value))


def _odd(rng: random.Random, field: Any, value: Any) -> Any:
    """A value of the field's type: near the one it has, at an edge of the type, or long."""
    if field.cpp_type == field.CPPTYPE_BOOL:
        return bool(rng.getrandbits(1))
    if field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
        return rng.choice((0.0, -1.0, float("nan"), float("inf"), 1e300))
    if field.cpp_type == field.CPPTYPE_STRING:
        data = value if isinstance(value, bytes) else value.encode()
        if data[:1] == b"{" and (parsed := _json(data)) is not None and rng.random() < 0.8:
            data = json.dumps(_damaged_value(rng, parsed)).encode()
        else:
            data = rng.choice((b"", b"x", data[:-1], data + b"\x00" * 4, data * 2, rng.randbytes(len(data) or 32)))
        return data if field.type == field.TYPE_BYTES else data.decode(errors="replace")
    most = (1 << (32 if field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_INT32) else 64)) - 1
    if field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_INT64):
        most >>= 1
    return rng.choice((0, 1, 2, max(0, value - 1), min(value + 1, most), 63, 64, 1 << 20, most >> 1, most))


def _damaged_value(rng: random.Random, value: object, depth: int = 0) -> object:
    """A JSON value with one thing in it replaced, removed or doubled; its own parts are not touched."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: _damaged_value(rng, value[key], depth + 1)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:at] + value[at + 1 :] if rng.random() < 0.5 else [*value, value[at]]
        return [*value[:at], _damaged_value(rng, value[at], depth + 1), *value[at + 1 :]]
    return rng.choice(ODD_VALUES)


def _json(sample: bytes) -> object:
    try:
        return json.loads(sample)
    except ValueError:
        return None
