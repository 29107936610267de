"""Which case runs where: kernels, providers and lists make groups, one boot for each group."""

from cases import CASES
from cases.registry import FARSIDE
from machine import kernels, paths, programs
from machine.report import Report
from machine.session import Session

PROVIDERS = ("verbs", "soft", "nvmet")
#: the kernel that runs the full list; the others run the short one
MAIN_KERNEL = "6.12"


def sessions(options) -> list[dict]:
    """Groups of (case, provider) that share a boot."""
    groups = []
    for series in options.kernel or [MAIN_KERNEL, *(s for s in kernels.SERIES if s != MAIN_KERNEL)]:
        wanted = options.list or ("full" if series == MAIN_KERNEL else "smoke")
        by_boot: dict = {}
        for case in CASES.values():
            if not case.in_list(wanted) or not _selected(case, options.k):
                continue
            for provider in options.provider or _providers(series, case):
                if provider in case.providers:
                    by_boot.setdefault((case.guests, case.append), []).append((case, provider))
        for (guests, append), work in sorted(by_boot.items(), key=lambda item: item[0]):
            work.sort(key=lambda pair: PROVIDERS.index(pair[1]))
            groups.append({"series": series, "guests": guests, "append": append, "work": work})
    return groups


def _providers(series: str, case) -> list[str]:
    """Without a wish: verbs everywhere, and the short list on the software provider on the main kernel."""
    return ["verbs", "soft"] if series == MAIN_KERNEL and case.list == "smoke" else ["verbs"]


def _selected(case, words) -> bool:
    return not words or any(word in case.name or word in case.topic for word in words)


def show(groups) -> None:
    for group in groups:
        for case, provider in group["work"]:
            print(f"{group['series']:5} {provider:6} {case.topic:8} {case.list:5} {case.name}")


def execute(groups, report: Report, options) -> None:
    for group in groups:
        series, work = group["series"], group["work"]
        kernel = kernels.available(series)
        missing = None if kernel else f"kernel {series} is not there: run tests/vm/setup"
        binary = paths.farside_binary()
        ready = []
        for case, provider in work:
            why = missing
            if provider in FARSIDE and not binary.exists():
                why = why or f"farside is not built: cargo build --release ({binary.name} not found)"
            why = why or programs.build(case.programs)
            if why:
                report.skip(series, provider, case.name, why)
            else:
                ready.append((case, provider))
        if not ready:
            continue
        if group["guests"] == 1:
            Session(kernel, ready, report, group["append"], options.keep).run()
        else:
            from machine.pair import run_pair_cases

            run_pair_cases(kernel, ready, report, options.keep)
