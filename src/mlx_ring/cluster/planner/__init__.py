"""What a plan would do: pure, without machines."""
