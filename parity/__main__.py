"""`python -m parity`."""

import sys

from parity.cli import console_main

sys.exit(console_main())
