"""Reading a run directory back: what the run comes to, and how to say it. Torch-free."""
