"""What the goldens of several families share."""
