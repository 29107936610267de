"""CPU of the target's process by rate, on the software provider: from idle to the peak."""

import time

from lab.soft import cpu_seconds, load, sample_of, served

SHARES = (1, 2, 5, 10, 20, 30, 50, 70, 90)
ROW = {"rw": "randread", "bs": 4096, "depth": 32, "jobs": 1}


def measure(run, options) -> None:
    with served() as target:

        def take(name: str, *more) -> dict:
            before, begun = cpu_seconds(target.pid), time.monotonic()
            sample = sample_of(load(ROW, options.seconds, *more), 0)
            sample["cpu_share"] = (cpu_seconds(target.pid) - before) / (time.monotonic() - begun)
            run.add("polling", name, "farside", 0, "any", sample)
            print(f"{name:10} {sample['iops']:10,.0f} IOPS  {100 * sample['cpu_share']:6.1f}% CPU", flush=True)
            return sample

        peak = take("peak")
        for share in SHARES:
            take(f"{share}%", "--rate-iops", int(peak["iops"] * share / 100))
        before, begun = cpu_seconds(target.pid), time.monotonic()
        time.sleep(max(5.0, options.seconds))
        idle = (cpu_seconds(target.pid) - before) / (time.monotonic() - begun)
        run.add("polling", "idle", "farside", 0, "any", {"iops": 0.0, "cpu_share": idle})
        print(f"idle       {100 * idle:6.2f}% CPU", flush=True)
