"""What was measured, in files that live in git."""
