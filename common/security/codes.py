"""One-time codes that a person reads on one machine and types on another. Knows neither files nor connections.

7K3MD-0QW8R-ZV5TX-2H9JC   19 random symbols, 95 bits, and a check symbol; letters and digits that look alike are one
"""

from __future__ import annotations

import hashlib
import secrets

from titan.common.errors import EnrolmentRefused

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # Crockford's base 32: no I, L, O, U
RANDOM_CHARS = 19
GROUP_CHARS = 5
MAX_TYPED_CHARS = 80
_LOOK_ALIKE = str.maketrans("OIL", "011")


def new_code() -> str:
    """A fresh code, as it is shown."""
    random = "".join(secrets.choice(ALPHABET) for _ in range(RANDOM_CHARS))
    return show_code(random + _check(random))


def show_code(code: str) -> str:
    return "-".join(code[i : i + GROUP_CHARS] for i in range(0, len(code), GROUP_CHARS))


def parse_code(typed: str) -> str:
    """The 20 symbols of a code, whatever case, spaces and dashes it was typed with.

    Raises:
        EnrolmentRefused: it cannot be a code. Found here, a slip of the finger costs none of the three tries.
    """
    mend = f"Type the {RANDOM_CHARS + 1} letters and digits as titan-worker shows them"
    if len(typed) > MAX_TYPED_CHARS:
        raise EnrolmentRefused(f"{len(typed)} characters are too many for a code", mend)
    code = "".join(typed.upper().replace("-", " ").split()).translate(_LOOK_ALIKE)
    if len(code) != RANDOM_CHARS + 1:
        raise EnrolmentRefused(f"the code has {len(code)} letters and digits, not {RANDOM_CHARS + 1}", mend)
    if not all(symbol in ALPHABET for symbol in code):
        raise EnrolmentRefused("the code has a character that codes never have", mend)
    if _check(code[:-1]) != code[-1]:
        raise EnrolmentRefused("the code has a mistake in it: its last symbol does not fit the others", mend)
    return code


def _check(random: str) -> str:
    return ALPHABET[hashlib.sha256(b"titan code " + random.encode("ascii")).digest()[0] % len(ALPHABET)]
