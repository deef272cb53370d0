"""`devmap inspect MODEL`."""

from __future__ import annotations

from typing import Annotated

import typer

from devmap_cli.cli.options import DtypeOption, Json, Model, QuantizeOption, Revision, TrustRemoteCode
from devmap_cli.cli.streams import print_json


def inspect(
    model: Model,
    depth: Annotated[
        int | None,
        typer.Option("--depth", min=0, help="Levels to show; without it, down to what may not be split."),
    ] = None,
    expand: Annotated[bool, typer.Option("--expand", help="Show each of several equal layers.")] = False,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Show what is in a model: its layer tree, sizes, ties and KV cache. Needs no weights."""
    from devmap_cli.model.load import load_spec

    spec = load_spec(
        model,
        revision=revision,
        dtype=dtype.value if dtype else None,
        quantize=quantize.value if quantize else None,
        trust_remote_code=trust_remote_code,
    )
    if as_json:
        from devmap_cli.model.document import inspect_document

        print_json(inspect_document(spec))
        return
    from devmap_cli.render.console import out
    from devmap_cli.render.tree import layer_tree

    out().print(layer_tree(spec, depth=depth, expand=expand))
