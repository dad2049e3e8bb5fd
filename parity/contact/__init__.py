"""The first minutes on a device that nobody tried before: `parity contact`.

`assumptions` says what the contracts take for granted of the hardware's functions, `probes` measures it, `steps` are
all that is tried and in which order, `session` runs each in a process of its own, against the clock, and writes a file.
"""
