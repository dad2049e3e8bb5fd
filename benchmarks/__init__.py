"""Speed, side by side with peers. Never part of the tests."""
