"""Names of dtypes that weights can be loaded in, as torch has them; no torch is imported for that."""

from __future__ import annotations

import re

_FLOATING = re.compile(r"bfloat16|float(16|32|64)|half|float|double|float8_\w+")
DTYPE_HINT = "one of float32, float16 and bfloat16"


def is_floating(name: object) -> bool:
    """Whether `name` is a floating-point dtype's; config.json may say `torch.float16` too."""
    return isinstance(name, str) and _FLOATING.fullmatch(name.removeprefix("torch.")) is not None
