"""Where each part goes: blocks and budgets in, a placement out."""
