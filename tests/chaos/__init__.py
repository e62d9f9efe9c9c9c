"""Randomised faults in real processes: tpwatch must not hang a job, change it, or make a finding up."""
