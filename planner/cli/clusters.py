"""`titan-plan clusters`: the catalogue; `clusters show NAME` draws the tiers with bandwidths."""

from __future__ import annotations

import json
from dataclasses import asdict

import click


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_context
def clusters(ctx: click.Context, as_json: bool) -> None:
    """List the clusters of the catalogue; `show NAME` draws one."""
    if ctx.invoked_subcommand is not None:
        return
    from cost_models.catalog import list_clusters

    found = list_clusters()
    if as_json:
        click.echo(json.dumps({"schema": 1, "clusters": [asdict(cluster) for cluster in found]}))
        return
    click.echo(f"{'name':<24} {'device':<14} {'GiB':>6} {'TFLOPS':>7} {'a node':>6}  description")
    for c in found:
        peak = c.device.peak_flops(c.device.default_precision) / 1e12
        click.echo(
            f"{c.name:<24} {c.device.name:<14} {c.device.usable_memory_bytes / 2**30:>6.1f} {peak:>7.1f} "
            f"{c.devices_per_node:>6}  {c.description}"
        )


@clusters.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def show(name: str, as_json: bool) -> None:
    """Draw the tiers of a cluster with their bandwidths."""
    from cost_models.catalog import find_cluster
    from cost_models.cluster_drawing import draw_tiers

    cluster = find_cluster(name)
    click.echo(json.dumps({"schema": 1, "cluster": asdict(cluster)}) if as_json else draw_tiers(cluster))
