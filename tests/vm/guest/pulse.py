"""How long the guest stood still: its host may take the processors away for seconds, and what waits then is not slow."""

import threading
import time

STEP, PAUSE = 0.1, 0.3
_lock = threading.Lock()
_late = _worst = 0.0


def start() -> None:
    threading.Thread(target=_beat, daemon=True).start()


def _beat() -> None:
    global _late, _worst
    last = time.monotonic()
    while True:
        time.sleep(STEP)
        now = time.monotonic()
        late, last = now - last - STEP, now
        if late > PAUSE:
            with _lock:
                _late, _worst = _late + late, max(_worst, late)


def clock() -> float:
    """Seconds without those in which the guest stood still."""
    with _lock:
        return time.monotonic() - _late


def worst() -> float:
    """The longest pause since it was last asked for, in seconds; 0 when none was longer than PAUSE."""
    global _worst
    with _lock:
        worst, _worst = _worst, 0.0
    return worst
