"""What an Identify, log or feature answer must hold: tables of field -> value or predicate, compared field by field."""

from guest.shell import Failed


class AtLeast:
    def __init__(self, least):
        self.least = least

    def __call__(self, value):
        return value >= self.least

    def __repr__(self):
        return f"at least {self.least}"


class Bits:
    """Bits that must be set, and bits that must not."""

    def __init__(self, set_=0, clear=0):
        self.set, self.clear = set_, clear

    def __call__(self, value):
        return value & self.set == self.set and not value & self.clear

    def __repr__(self):
        return f"bits {self.set:#x} set and {self.clear:#x} clear"


class Text:
    """Printable ASCII, not blank; padding belongs to the wire and is gone in the JSON."""

    def __call__(self, value):
        return bool(value.strip()) and all(" " <= c <= "~" for c in value)

    def __repr__(self):
        return "printable text"


def fields(what: str, got: dict, table: dict) -> None:
    """Every field of the table is there and as it should be; all the wrong ones are named at once."""
    wrong = []
    for name, want in table.items():
        if name not in got:
            wrong.append(f"{name} is missing")
        elif not (want(got[name]) if callable(want) else got[name] == want):
            wrong.append(f"{name} is {got[name]!r}, expected {want!r}")
    if wrong:
        raise Failed(f"{what}: " + "; ".join(wrong))
