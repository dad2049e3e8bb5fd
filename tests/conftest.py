"""Settings of hypothesis and of Python's garbage collector.

Hypothesis draws by the profile `ci`, the same examples every time; `pytest --hypothesis-profile=deep` draws new ones.
"""

import gc

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, database=None, print_blob=False)
settings.register_profile("deep", max_examples=2500, deadline=None)
settings.load_profile("ci")


def pytest_collection_finish() -> None:
    """Take what collection left out of the garbage collector's sight, since it lives to the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50)
