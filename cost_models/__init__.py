"""What a layout costs: memory, time and traffic, as pure functions of frozen values and arrays."""
