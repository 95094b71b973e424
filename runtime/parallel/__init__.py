"""How a layout is executed: one file per dimension."""
