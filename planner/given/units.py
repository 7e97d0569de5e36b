"""Rates in words: gigabytes a second, as NCCL prints them, beside gigabits a second, as networks are sold."""

import math

from paxtrain.errors import UserError

GIGA = 1e9
_BITS = 8
# Gbit/s that one port of a NIC has been sold with, Ethernet's and InfiniBand's (SDR to XDR).
_SOLD = (1, 2.5, 5, 10, 20, 25, 40, 50, 56, 100, 200, 400, 800)


def digits(value: float) -> str:
    """Return a number with three significant digits, or all that are left of the point, with commas."""
    places = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    text = f"{value:,.{min(places, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def rate(bytes_per_second: float) -> str:
    """Return a rate in both units: "370 GB/s = 2,960 Gbit/s"."""
    return f"{digits(bytes_per_second / GIGA)} GB/s = {digits(bytes_per_second * _BITS / GIGA)} Gbit/s"


def microseconds(seconds: float) -> str:
    """Return a latency: "4.2 us"."""
    return f"{digits(seconds * 1e6)} us"


def of_gbit(gbit: float) -> float:
    """Return bytes/s of a rate in Gbit/s."""
    return gbit * GIGA / _BITS


def nic_rate(name: str, gbit: float) -> float:
    """Return the bytes/s of a NIC.

    Args:
        name: what says so, for messages.
        gbit: its rate in Gbit/s.

    Raises:
        UserError: no NIC is sold with that rate, but perhaps with 8 times that, or a thousandth or a thousand times.
    """
    if not any(math.isclose(gbit, sold) for sold in _SOLD):
        others = {"GB/s": gbit * _BITS, "Mbit/s": gbit / 1000, "Tbit/s": gbit * 1000}
        meant = [f"{sold:g} if {gbit:g} is in {unit}" for unit, sold in others.items() if sold in _SOLD]
        hint = f"write {' or '.join(meant)}" if meant else f"NICs have {', '.join(f'{sold:g}' for sold in _SOLD)}"
        raise UserError(f"{name} is {gbit:g} Gbit/s, which no NIC has; {hint}")
    return of_gbit(gbit)
