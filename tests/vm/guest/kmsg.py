"""The kernel's log as it grows."""

import os


class KernelLog:
    """The kernel's messages since the last look, as (level, text)."""

    def __init__(self):
        self.device = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)

    @classmethod
    def from_now(cls) -> "KernelLog":
        """Without what was said before. Lines of `dmesg` cannot be counted: the kernel's buffer is full after a while."""
        log = cls()
        os.lseek(log.device, 0, os.SEEK_END)
        return log

    def close(self) -> str:
        """The text of what is new, line by line; the end of this log."""
        said = "\n".join(text for _, text in self.new())
        os.close(self.device)
        return said

    def new(self) -> list[tuple[int, str]]:
        lines = []
        while True:
            try:
                record = os.read(self.device, 8192).decode(errors="replace")
            except BlockingIOError:
                return lines
            except BrokenPipeError:
                lines.append((4, "(kernel messages were lost)"))
                continue
            head, _, text = record.partition(";")
            level, _, micros = head.split(",")[:3]
            text = text.splitlines()[0]
            if int(level) >> 3 == 0:  # facility 0: the kernel's own
                lines.append((int(level) & 7, f"[{int(micros) / 1e6:.3f}] {text}"))
