"""How long searches and training steps take on this machine; ratios of paired runs, never a test."""
