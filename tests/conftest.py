"""How much hypothesis draws: `ci`, the same every time; `pytest --hypothesis-profile=deep`, new and many.

And what Python's collector looks at.
"""

import gc

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, database=None, print_blob=False)
settings.register_profile("deep", max_examples=2500, deadline=None)
settings.load_profile("ci")


def pytest_collection_finish() -> None:
    """What collection left lives to the end: the collector, which would look at it time and again, leaves it alone."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50)
