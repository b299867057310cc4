"""Text that others wrote, made harmless for whoever shows it."""


def printable(text: str) -> str:
    """Text that can do nothing to a terminal.

    >>> printable("a\\x1b[2Jb\\nc")
    'a\\\\x1b[2Jb\\\\nc'
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
