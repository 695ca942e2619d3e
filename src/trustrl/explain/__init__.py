"""A run's folder -> why it went wrong: ranked causes with the numbers behind each, or nothing."""
