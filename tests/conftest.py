"""What holds for the whole test run."""

import signal


def pytest_configure() -> None:
    """A shell tells what it runs in the background to ignore SIGINT; the children must not."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
