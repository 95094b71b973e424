"""Model architectures, one YAML a model, each number with its source."""
