"""Data of the catalogue: models, clusters, calibrations and examples, installed as `titan_plan_configs`."""
