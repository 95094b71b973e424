"""The decoder family that the trainer trains, and its lean operators."""
