"""Example config.yaml files."""
