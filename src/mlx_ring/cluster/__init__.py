"""The head's coordinator: state, membership, planner, recovery."""
