"""What models on a backbone cost, for the stored tables of `inlinevit models`."""

from collections.abc import Callable, Mapping

# parameters and gmacs of each architecture on a backbone; all but the first have a prefix.
Facts = dict[str, float]


def measure_archs(measure: Callable[[str, str], tuple[int, float]], archs: Mapping[str, str], backbone: str) -> Facts:
    """Measure the cost of all architectures on a backbone.

    Args:
        measure: From an architecture and a backbone to parameters and multiply-adds, in 10⁹.
        archs: The architectures by the prefix of their fields.
        backbone: The backbone.
    """
    facts: Facts = {}
    for prefix, arch in archs.items():
        parameters, gmacs = measure(arch, backbone)
        facts |= {f"{prefix}parameters": parameters, f"{prefix}gmacs": round(gmacs, 1)}
    return facts
