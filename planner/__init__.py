"""Which layouts exist, which is best, and why."""
