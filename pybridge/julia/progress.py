"""One line on stderr while a person waits for Julia to start or to compile."""

import os
import sys
import threading

#: Seconds of silence before a line about something whose length nobody knows.
PATIENCE = 2.0


def wanted() -> bool:
    """Whether somebody watches: stderr is a terminal, or Python is interactive as in Jupyter.

    ``PYBRIDGE_PROGRESS=1`` or ``0`` decides otherwise.
    """
    choice = os.environ.get("PYBRIDGE_PROGRESS", "")
    if choice not in ("", "0", "1"):
        raise ValueError(f"PYBRIDGE_PROGRESS is {choice!r}; accepted are '1', '0' and ''")
    if choice:
        return choice == "1"
    return sys.stderr is not None and (sys.stderr.isatty() or hasattr(sys, "ps1"))


class Announcement:
    """Says ``text`` on stderr after ``patience`` seconds in its block, and takes it back on a terminal."""

    def __init__(self, text, patience=PATIENCE):
        self.text = f"pybridge: {text} ..."
        self.patience = patience
        self.timer = None
        self.said = False

    def __enter__(self):
        if wanted():
            if self.patience:
                self.timer = threading.Timer(self.patience, self._say)
                self.timer.daemon = True
                self.timer.start()
            else:
                self._say()

    def __exit__(self, *_):
        if self.timer is not None:
            self.timer.cancel()
            self.timer.join()
        if self.said and sys.stderr.isatty():
            print("\r" + " " * len(self.text) + "\r", end="", flush=True, file=sys.stderr)

    def _say(self):
        self.said = True
        end = "" if sys.stderr.isatty() else "\n"
        print(self.text, end=end, flush=True, file=sys.stderr)


def watch_first_call(name, inside):
    """From a thread of its own, say so when Julia is in calls for long: the next is the first of a plan.

    Args:
      name: of the function.
      inside: how many calls Julia is in, when called.
    """
    if wanted():
        threading.Thread(target=_watch, args=(name, inside), daemon=True).start()


def _watch(name, inside, idle=60.0, tick=0.1):
    pause = threading.Event()
    while not inside():
        idle -= tick
        if idle < 0 or pause.wait(tick):
            return
    with Announcement(f"Julia compiles the first call of {name}"):
        while inside():
            pause.wait(tick)
