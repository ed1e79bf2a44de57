"""Hypothesis profiles: `ci` by default; `pytest --hypothesis-profile=fuzz tests/properties` searches for long."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_COMMON = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("ci", max_examples=100, derandomize=True, database=None, **_COMMON)
settings.register_profile("fuzz", max_examples=2_000, **_COMMON)


def pytest_configure(config) -> None:
    """Take `ci` unless the command line names a profile."""
    if not config.getoption("--hypothesis-profile", default=None):
        settings.load_profile("ci")
