"""One block as a file: magic, digest, header, raw bytes. A file that is not exactly right is no block. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np

__all__ = ["FileBlock", "decode_block", "encode_block"]

_MAGIC = b"titanKV1"
_DIGEST_BYTES = 32
_MAX_HEADER_BYTES = 4096
_BITS = {"float32": "<u4", "float16": "<u2", "bfloat16": "<u2"}


@dataclass(frozen=True, slots=True, eq=False)
class FileBlock:
    """A block's keys and values as raw bits (uint32 or uint16), and the dtype that they stand for."""

    dtype: str
    keys: np.ndarray
    values: np.ndarray


def encode_block(name: bytes, block: FileBlock) -> bytes:
    """The file of a block."""
    header = json.dumps(
        {
            "name": name.hex(),
            "dtype": block.dtype,
            "keys": block.keys.shape,
            "values": block.values.shape,
        }
    ).encode()
    content = len(header).to_bytes(4, "little") + header + block.keys.tobytes() + block.values.tobytes()
    return _MAGIC + hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest() + content


def decode_block(name: bytes, data: bytes) -> FileBlock | None:
    """The block in a file, or None when it is damaged or another's."""
    start = len(_MAGIC) + _DIGEST_BYTES
    content = memoryview(data)[start:]
    if data[: len(_MAGIC)] != _MAGIC or len(content) < 4:
        return None
    if hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest() != data[len(_MAGIC) : start]:
        return None
    length = int.from_bytes(content[:4], "little")
    if length > _MAX_HEADER_BYTES or 4 + length > len(content):
        return None
    try:
        header = json.loads(bytes(content[4 : 4 + length]))
        bits = np.dtype(_BITS[header["dtype"]])
        keys, values = tuple(header["keys"]), tuple(header["values"])
        size = int(np.prod(keys)) * bits.itemsize
        if header["name"] != name.hex() or size + int(np.prod(values)) * bits.itemsize != len(content) - 4 - length:
            return None
        body = content[4 + length :]
        return FileBlock(
            str(header["dtype"]),
            np.frombuffer(body[:size], bits).reshape(keys),
            np.frombuffer(body[size:], bits).reshape(values),
        )
    except (ValueError, KeyError, TypeError):
        return None
