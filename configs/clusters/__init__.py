"""Clusters and devices, one YAML a cluster, each number with its source."""
