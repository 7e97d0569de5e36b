"""The error of bad input: one sentence for the user. `command_line` prints it and exits with code 2."""

PREFIX = "error: "  # begins the sentence; a supervisor looks for it in a worker's output


class UserError(Exception):
    """Bad input: the message is one sentence that says what is wrong, what was given and what would work."""
