"""The trainer that executes a plan, and the config.yaml that both sides read."""
