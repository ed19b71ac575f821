"""Training of draft networks: its rows, the frozen target, its steps, and what is measured."""
