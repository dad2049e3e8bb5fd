"""How good is the net? Plants small faults in the code, one at a time, and counts those that the tests catch.

`python -m mutation` runs a campaign; docs/mutation.md says how, and what the last one found.
"""
