"""Options that several commands share."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer


class Dtype(str, Enum):
    """What the weights are loaded in."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class Scheme(str, Enum):
    """What bitsandbytes makes of the weights: the names of `model.quantization.scheme.SCHEMES`."""

    int8 = "int8"
    nf4 = "nf4"
    fp4 = "fp4"


class Strategy(str, Enum):
    """The rule by which parts are placed: the names of `planning.strategies.STRATEGIES`, or all of them."""

    auto = "auto"
    balanced = "balanced"
    balanced_low_0 = "balanced_low_0"
    sequential = "sequential"
    fewest = "fewest"
    all = "all"


Model = Annotated[str, typer.Argument(metavar="MODEL", help="A hub id, or a folder with config.json.")]
DtypeOption = Annotated[
    Dtype | None, typer.Option("--dtype", help="Load in this dtype instead of the one config.json states.")
]
QuantizeOption = Annotated[
    Scheme | None, typer.Option("--quantize", help="Let bitsandbytes quantize the weights while they are loaded.")
]
Revision = Annotated[
    str | None, typer.Option("--revision", metavar="REV", help="A branch, tag or commit of the hub model.")
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run the model code that comes with the model's repository."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
