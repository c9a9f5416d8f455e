"""Find the Chromium or Chrome that is installed on this machine."""
import shutil

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable",
            "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")


def find_chromium() -> str | None:
    """Return the path of the browser's program, or None if there is none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)
