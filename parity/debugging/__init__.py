"""Where an error comes from, and the smallest case that shows it."""
