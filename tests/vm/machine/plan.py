"""Which case runs where: kernels, providers and lists make groups, one boot for each group."""

from concurrent.futures import ThreadPoolExecutor

from cases import CASES
from cases.registry import FARSIDE, NETWORKS, Case
from machine import kernels, paths, programs
from machine.report import Report
from machine.session import Session
from machine.work import Work

PROVIDERS = ("verbs", "soft", "nvmet")
#: the kernel that runs the full list; the others run the short one
MAIN_KERNEL = "6.12"
#: topics of which the software provider passes everything too; of the others what asks for it (`also=`), and in the list of all
ON_SOFT = ("backend", "cli", "disk", "faults", "filesystem", "fio", "gates", "host", "net", "operate", "programs")
#: topics whose cases run on the other kernels too
ON_EVERY_KERNEL = ("cli",)


def sessions(options) -> list[dict]:
    """Groups of work that share a boot."""
    groups = []
    for series in options.kernel or [MAIN_KERNEL, *(s for s in kernels.SERIES if s != MAIN_KERNEL)]:
        by_boot: dict = {}
        for case in CASES.values():
            wanted = options.list or ("full" if series == MAIN_KERNEL or case.topic in ON_EVERY_KERNEL else "smoke")
            if not _selected(case, options.k):
                continue
            settings = _settings(series, case, options) if case.in_list(wanted) else []
            for work in dict.fromkeys(settings + _also(series, case, options)):
                if work.provider in case.providers:
                    by_boot.setdefault((case.guests, case.append, work.provider), []).append(work)
        for (guests, append, _), work in sorted(by_boot.items(), key=lambda item: item[0]):
            work.sort(key=lambda one: (PROVIDERS.index(one.provider), NETWORKS.index(one.network)))
            groups.append({"series": series, "guests": guests, "append": append, "work": work})
    # The longest first, so that the last ones end together.
    return sorted(groups, key=lambda group: -sum(work.case.timeout for work in group["work"]))


def _settings(series: str, case: Case, options) -> list[Work]:
    """Without a wish: verbs everywhere, and on the main kernel the software provider too, its short list over every
    network. `--list all` is both providers everywhere."""
    if options.provider or options.network:
        providers, networks = options.provider or ["verbs", "soft"], options.network or NETWORKS[:1]
        return [Work(case, provider, network) for provider in providers for network in networks]
    work = [Work(case, "verbs")]
    if options.list == "all" or series == MAIN_KERNEL and (case.list == "smoke" or case.topic in ON_SOFT):
        work.append(Work(case, "soft"))
    if series == MAIN_KERNEL and case.list == "smoke":
        work += [Work(case, "soft", network) for network in NETWORKS[1:]]
    return work


def _also(series: str, case: Case, options) -> list[Work]:
    """What a case asks for beyond its list, unless the run is of a list, a provider or a network."""
    if options.list or options.provider or options.network:
        return []
    here = "soft" if series == MAIN_KERNEL else series
    return [Work(case, "soft" if here == "soft" else "verbs")] if here in case.also else []


def _selected(case, words) -> bool:
    return not words or any(word in case.name or word in case.topic for word in words)


def show(groups) -> None:
    for group in groups:
        for work in group["work"]:
            print(f"{group['series']:5} {work.setting:12} {work.case.topic:8} {work.case.list:5} {work.case.name}")


def execute(groups, report: Report, options) -> None:
    """Guests that share two cores starve each other for longer than rxe waits for an acknowledgement: one at a time there."""
    runs = [run for run in (_prepare(group, report, options) for group in groups) if run]
    with ThreadPoolExecutor(options.jobs) as lanes:
        for done in [lanes.submit(run) for run in runs]:
            done.result()


def _prepare(group, report: Report, options):
    """A function that runs what of a group can run; the rest is reported as skipped."""
    series, work = group["series"], group["work"]
    kernel = kernels.available(series)
    missing = None if kernel else f"kernel {series} is not there: run tests/vm/setup"
    binary = paths.farside_binary()
    ready = []
    for one in work:
        why = missing
        if one.provider in FARSIDE and not binary.exists():
            why = why or f"farside is not built: cargo build --release ({binary.name} not found)"
        why = why or programs.build(one.case.programs)
        if why:
            report.skip(series, one.setting, one.case.name, why)
        else:
            ready.append(one)
    if not ready:
        return None
    if group["guests"] == 1:
        return Session(kernel, ready, report, group["append"], options.keep).run
    from machine.pair import run_pair_cases

    return lambda: run_pair_cases(kernel, ready, report, options.keep)
