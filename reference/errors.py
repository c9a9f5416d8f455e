"""The one exception that is written for the user."""


class UserError(ValueError):
    """An error that the user can mend: in an option, a size, a file.

    The message is one or more whole sentences that name the option or the file, its value, the rule it breaks and what
    to do about it. Programs print it without a traceback and exit with status 2.
    """
