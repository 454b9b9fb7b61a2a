"""What holds for the whole test run."""

import signal


def pytest_configure() -> None:
    """A run in the background of a shell is told to ignore SIGINT, and its children would be too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
