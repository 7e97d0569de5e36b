"""What the lab measures, a module for each experiment."""
