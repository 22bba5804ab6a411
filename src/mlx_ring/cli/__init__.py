"""What a person types: a thin shell over the rest."""
