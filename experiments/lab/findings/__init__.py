"""What the lab's records say, a module for each section of the page."""
