"""The one exception a person is meant to read."""


class UserError(ValueError):
    """Something the person can mend: an option, a size, a file.

    The message is one or more whole sentences that name the option or the file, its value, the rule it breaks
    and what to do about it. Programs print it without a traceback and exit with status 2.
    """
