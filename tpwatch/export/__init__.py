"""Where results go. Exporters write what they are given; they never decide."""
