"""`titan-plan explain CODE`: what a code means."""

from __future__ import annotations

import json
from dataclasses import asdict

import click


@click.command()
@click.argument("code")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def explain(code: str, as_json: bool) -> None:
    """Explain a code such as D201: the rule, an example, its source."""
    from cost_models.codes import find_code

    found = find_code(code)
    if as_json:
        click.echo(json.dumps({"schema": 1, **asdict(found), "kind": found.kind}))
        return
    click.echo(f"{found.code} ({found.kind}): {found.title}\n\n{found.explanation}")
    click.echo(f"\nexample: {found.example}\nsource:  {found.source}")
