"""Training scripts as users have them."""
