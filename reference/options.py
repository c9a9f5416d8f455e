"""The parser of command lines, for all programs."""
import argparse


class OptionParser(argparse.ArgumentParser):
    """argparse's parser, which refuses `--option=--`: Python 3.11 makes an empty list of that, whatever the type."""

    def _get_values(self, action, arg_strings):
        if arg_strings == ["--"] and action.option_strings:
            self.error(f"argument {'/'.join(action.option_strings)}: -- is not a value")
        return super()._get_values(action, arg_strings)
