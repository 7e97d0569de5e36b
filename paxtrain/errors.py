"""Bad input: its error, one sentence for the user, and whole numbers that users write.

`command_line` prints the sentence and exits with code 2.
"""

PREFIX = "error: "  # begins the sentence; a supervisor looks for it in a worker's output


class UserError(Exception):
    """Bad input: the message is one sentence that says what is wrong, what was given and what would work."""


def whole(text: str, most: int = 2**31 - 1) -> int | None:
    """Return the number that a text of digits is; None if it is anything else or above `most`.

    Python's own int() also takes 1_0, +1, blanks and digits of all scripts.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        return None
    number = int(text)
    return number if number <= most else None
