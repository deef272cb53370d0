"""Where a model can go: devices, budgets, and what this machine has."""
