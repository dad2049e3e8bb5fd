"""From numbers to a verdict."""
