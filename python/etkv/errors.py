"""Errors that a user can put right, and how errors of other packages are told."""


class EtkvError(ValueError):
    """Something the caller can put right: the message names the value and the limit it breaks, in one line.

    The commands of this package print it to stderr and end with status 2.
    """


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where the message is empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def root_line(error: BaseException) -> str:
    """The first line of the error that began the chain which ``error`` ends.

    A tracer reports its own trouble; what the model's code said is at the bottom.
    """
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return first_line(error)
