"""`titan-plan models`: the catalogue with parameter counts."""

from __future__ import annotations

import json
from dataclasses import asdict

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def models(as_json: bool) -> None:
    """List the models of the catalogue."""
    from cost_models.catalog import list_models

    entries = list_models()
    if as_json:
        listed = [
            {
                "name": e.name,
                "family": e.family,
                "size": e.size,
                "aliases": list(e.aliases),
                "parameters": e.spec.total_params,
                "active_parameters": e.spec.active_params,
                "published_parameters": e.published_parameters,
                "source": e.source,
                "architecture": asdict(e.spec),
            }
            for e in entries
        ]
        click.echo(json.dumps({"schema": 1, "models": listed}))
        return
    click.echo(f"{'name':<20} {'parameters':>18} {'active':>9} {'layers':>6} {'hidden':>6} {'seq':>6}  also known as")
    for e in entries:
        spec = e.spec
        click.echo(
            f"{e.name:<20} {spec.total_params:>18,} {spec.active_params / 1e9:>8.1f}B {spec.n_layers:>6} "
            f"{spec.hidden_dim:>6} {spec.seq_len:>6}  {', '.join(e.aliases[:4])}"
        )
