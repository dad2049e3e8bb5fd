"""How much hypothesis draws: `ci`, the same every time; `pytest --hypothesis-profile=deep`, new and many."""

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, database=None, print_blob=False)
settings.register_profile("deep", max_examples=2500, deadline=None)
settings.load_profile("ci")
