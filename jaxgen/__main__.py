"""`python -m jaxgen` is `jaxgen`."""

import sys

from jaxgen.cli import main

sys.exit(main())
