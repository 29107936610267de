"""Writes blocks and notes each promise of the target: what was noted must be there after any power loss.

    writer.py DISK MODE SPAN NOTES
    dsync   every write carries FUA or is flushed (O_DSYNC); it is noted when it returns
    fsync   eight writes, one fdatasync; the eight are noted when it returns

A block holds its number and its generation all over. Notes are lines `block generation`.
"""

import mmap
import os
import struct
import sys

BLOCK = 4096
GROUP = 8


def pattern(block: int, generation: int) -> bytes:
    return struct.pack("<QQ", block, generation) * (BLOCK // 16)


def write_all(disk: str, mode: str, span: int, notes_path: str) -> None:
    flags = os.O_RDWR | os.O_DIRECT | (os.O_DSYNC if mode == "dsync" else 0)
    device = os.open(disk, flags)
    buffer = mmap.mmap(-1, BLOCK)  # page aligned, as O_DIRECT wants it
    with open(notes_path, "a", buffering=1) as notes:
        blocks, generation = span // BLOCK, 0
        while True:
            generation += 1
            for first in range(0, blocks, GROUP):
                group = range(first, min(first + GROUP, blocks))
                for block in group:
                    buffer[:] = pattern(block, generation)
                    if os.pwrite(device, buffer, block * BLOCK) != BLOCK:
                        raise OSError("short write")
                    if mode == "dsync":
                        notes.write(f"{block} {generation}\n")
                if mode == "fsync":
                    os.fdatasync(device)
                    notes.write("".join(f"{block} {generation}\n" for block in group))


def check(disk: str, notes_path) -> dict:
    """A block must hold the generation that was noted last, or a later one that was on its way."""
    promised: dict[int, int] = {}
    for line in open(notes_path):
        if line.endswith("\n"):
            block, generation = map(int, line.split())
            promised[block] = generation
    device = os.open(disk, os.O_RDONLY | os.O_DIRECT)
    buffer = mmap.mmap(-1, BLOCK)
    lost = []
    for block, generation in sorted(promised.items()):
        os.preadv(device, [buffer], block * BLOCK)
        number, found = struct.unpack_from("<QQ", buffer)
        if number != block or found < generation or buffer[:] != pattern(block, found):
            lost.append(block)
    os.close(device)
    return {"promised": len(promised), "lost": lost}


if __name__ == "__main__":
    write_all(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
