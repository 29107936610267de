"""What there is to do: a case with the setting that it runs in."""

from dataclasses import dataclass

from cases.registry import NETWORKS, Case


#: seconds without a processor after which rxe gives up on acknowledgements that wait in the guest itself
STANDSTILL = 1.0


@dataclass(frozen=True)
class Work:
    """A case, and where its target runs."""

    case: Case
    provider: str
    network: str = NETWORKS[0]

    @property
    def setting(self) -> str:
        """As it stands in the report: `soft`, `soft/ipv6`."""
        return self.provider if self.network == NETWORKS[0] else f"{self.provider}/{self.network}"
