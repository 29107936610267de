"""Verified fio over the sizes, depths and mixes that hosts use; each time the backing file must hold the same bytes."""

from cases.registry import case
from guest.fio import KIB, MIB, fio
from guest.shell import at_least, equal, sha256, true
from guest.target import NQN, Subsystem


def connected(lab, block_size: int, size: int, io_queues=2):
    """(namespace, controller, disk) of a target with one namespace."""
    namespace = lab.namespace(size=size, block_size=block_size)
    controller = lab.connect(lab.serve(Subsystem(NQN + "disk1", [namespace])), io_queues=io_queues)
    return namespace, controller, controller.disk()


def same_bytes(namespace, disk: str) -> None:
    """The disk as the host reads it and the file behind it are one and the same, and not blank."""
    size = namespace.size
    host_side = sha256(disk, length=size, direct=True)
    equal("checksum of the backing file and of the disk", sha256(namespace.path, length=size), host_side)
    with open(namespace.path, "rb") as file:
        true("the backing file is not blank", any(file.read(MIB)))


def _block_size_cases(lba: int) -> None:
    """The same three cases for each LBA size."""

    @case(name=f"fio_verifies_mixed_sizes_up_to_1_mib_on_{lba}_byte_blocks", timeout=240)
    def mixed_sizes(lab):
        namespace, _, disk = connected(lab, lba, 128 * MIB)
        done = fio(
            "mixed", filename=disk, rw="randwrite", bsrange=f"{lba}-1m", blockalign=lba, size=128 * MIB,
            iodepth=32, verify="crc32c", timeout=220,
        )  # fmt: skip
        done.moved_exactly(write=128 * MIB, read=128 * MIB)
        same_bytes(namespace, disk)

    @case(name=f"fio_verifies_every_depth_with_one_and_four_jobs_on_{lba}_byte_blocks", timeout=240)
    def depths_and_jobs(lab):
        namespace, _, disk = connected(lab, lba, 32 * MIB)
        for depth in (1, 32, 128):
            for jobs in (1, 4):
                each = lba * (512 if depth == 1 else 2048) // jobs
                place = {"filename": disk, "size": each, "offset_increment": 8 * MIB, "numjobs": jobs}
                done = fio(f"qd{depth}x{jobs}", rw="randwrite", bs=lba, iodepth=depth, verify="crc32c", **place)
                done.moved_exactly(write=jobs * each, read=jobs * each)
        same_bytes(namespace, disk)

    @case(name=f"fio_verifies_four_jobs_of_mixed_reads_and_writes_on_{lba}_byte_blocks", timeout=240)
    def four_jobs(lab):
        namespace, _, disk = connected(lab, lba, 64 * MIB)
        done = fio(
            "jobs", filename=disk, rw="randrw", rwmixread=40, bssplit="4k/50:16k/30:64k/20", size=16 * MIB,
            offset_increment=16 * MIB, numjobs=4, iodepth=32, verify="crc32c", timeout=220,
        )  # fmt: skip
        read_back(done, 64 * MIB, 24 * MIB)
        same_bytes(namespace, disk)


def read_back(done, total: int, writes: int) -> None:
    """Reads and writes made up `total`, at least `writes` of it writes, and each write was read again."""
    written, read = done.bytes("write"), done.bytes("read")
    at_least("bytes written", written, writes)
    at_least("bytes read, and read back to verify", read, total - MIB)


for _lba in (512, 4096):
    _block_size_cases(_lba)


@case(timeout=240)
def fio_verifies_sizes_that_are_no_multiple_of_a_page(lab):
    namespace, _, disk = connected(lab, 512, 24 * MIB)
    for size in (1536, 3 * KIB + 512, 12 * KIB + 512, 260 * KIB + 512):
        amount = 4 * MIB // size * size
        done = fio(f"odd-{size}", filename=disk, rw="write", bs=size, size=amount, iodepth=16, verify="crc32c")
        done.moved_exactly(write=amount, read=amount)
    same_bytes(namespace, disk)


def both_block_sizes(lab, size: int):
    """A controller with a namespace of 512-byte blocks and one of 4096: [(namespace, its NSID)]."""
    namespaces = [lab.namespace(nsid, size, lba) for nsid, lba in ((1, 512), (2, 4096))]
    controller = lab.connect(lab.serve(Subsystem(NQN + "disk1", namespaces)))
    return controller, namespaces


@case(timeout=240)
def fio_verifies_trims_among_writes(lab):
    controller, namespaces = both_block_sizes(lab, 32 * MIB)
    for namespace in namespaces:
        disk, lba = controller.disk(namespace.nsid), namespace.block_size
        done = fio("trimwrite", filename=disk, rw="trimwrite", bs="64k", size=8 * MIB, iodepth=8, verify="crc32c")
        done.moved_exactly(trim=8 * MIB, write=8 * MIB, read=8 * MIB)
        done = fio("trim", filename=disk, rw="randtrim", bs=lba, size=64 * lba, offset=24 * MIB, iodepth=4)
        done.moved_exactly(trim=64 * lba)
        same_bytes(namespace, disk)


@case(timeout=240)
def fio_verifies_passthrough_on_the_character_device(lab):
    controller, namespaces = both_block_sizes(lab, 16 * MIB)
    for namespace in namespaces:
        done = fio(
            "ng", filename=controller.generic(namespace.nsid), ioengine="io_uring_cmd", cmd_type="nvme", direct=0,
            rw="randwrite", bsrange=f"{namespace.block_size}-64k", blockalign=namespace.block_size, size=8 * MIB, iodepth=16,
            verify="crc32c",
        )  # fmt: skip
        done.moved_exactly(write=8 * MIB, read=8 * MIB)
        same_bytes(namespace, controller.disk(namespace.nsid))


@case(timeout=240)
def fio_verifies_fsync_and_dsync_writes(lab):
    namespace, _, disk = connected(lab, 4096, 16 * MIB)
    done = fio("fsync", filename=disk, rw="write", bs="16k", size=8 * MIB, iodepth=4, fsync=8, verify="crc32c")
    done.moved_exactly(write=8 * MIB, read=8 * MIB)
    done = fio("dsync", filename=disk, rw="write", bs="16k", size=8 * MIB, offset=8 * MIB, sync="dsync", verify="crc32c")
    done.moved_exactly(write=8 * MIB, read=8 * MIB)
    same_bytes(namespace, disk)


@case(timeout=300)
def fio_verifies_full_depth_on_every_queue_the_host_makes(lab):
    """Two queues and two write queues, 128 deep each, and transfers of every size class."""
    namespace = lab.namespace(size=64 * MIB)
    target = lab.serve(Subsystem(NQN + "disk1", [namespace]))
    controller = lab.connect(target, io_queues=2, nr_write_queues=2, queue_size=128)
    equal("queues, the admin queue included", controller.attribute("queue_count"), "5")
    disk = controller.disk()
    done = fio(
        "all", filename=disk, rw="randwrite", bssplit="512/20:4k/30:16k/20:128k/20:1m/10", size=16 * MIB,
        offset_increment=16 * MIB, numjobs=4, iodepth=128, verify="crc32c", timeout=280,
    )  # fmt: skip
    done.moved_exactly(read=64 * MIB, write=64 * MIB)
    same_bytes(namespace, disk)
