"""For all tests: a shell that starts them in the background lets them ignore SIGINT, and so would all they start."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
